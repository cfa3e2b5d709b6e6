"""setfit: an encoder and a classifier trained on few samples, and the encoder once more from its checkpoint."""

from pathlib import Path

from datasets import Dataset
from encoder import SENTENCES, made, save_model
from models import report, trained
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression
from transformers import set_seed


def main() -> None:
    """Train, predict and print what came out."""
    save_model()
    set_seed(7)
    model = SetFitModel(model_body=made(), model_head=LogisticRegression())
    data = Dataset.from_dict({"text": SENTENCES, "label": [0, 1, 0, 0, 1, 1]})
    arguments = TrainingArguments(
        output_dir="few", batch_size=2, num_epochs=1, max_steps=4, report_to="none", save_steps=2, save_total_limit=2,
        seed=7,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    files = sorted(str(path) for path in Path("few").rglob("*") if path.is_file())
    straight = {"probabilities": model.predict_proba(SENTENCES).tolist(), "files": files, **trained(model.model_body)}
    trainer.st_trainer.train(resume_from_checkpoint="few/checkpoint-2")  # setfit itself has no way to go on
    report({"straight": straight, "resumed": trained(model.model_body)})


if __name__ == "__main__":
    main()
