"""setfit: an encoder and a classifier trained on few samples."""

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
        output_dir="few", batch_size=2, num_epochs=1, max_steps=4, report_to="none", save_strategy="no", seed=7
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    report({"probabilities": model.predict_proba(SENTENCES).tolist(), **trained(model.model_body)})


if __name__ == "__main__":
    main()
