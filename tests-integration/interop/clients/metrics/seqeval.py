"""Counts of tags, for `evaluate.load("seqeval")` without a hub: a tag is an entity of its own here."""

import datasets
import evaluate


class Tags(evaluate.Metric):  # type: ignore[misc]
    """Precision, recall, F1 and accuracy of tags other than O."""

    def _info(self) -> evaluate.MetricInfo:
        tags = datasets.Sequence(datasets.Value("string"))
        return evaluate.MetricInfo(
            description="",
            citation="",
            inputs_description="",
            features=datasets.Features({"predictions": tags, "references": tags}),
        )

    def _compute(self, predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
        pairs = [pair for row in zip(predictions, references, strict=True) for pair in zip(*row, strict=True)]
        right = sum(found == tag != "O" for found, tag in pairs)
        precision = right / max(1, sum(found != "O" for found, _ in pairs))
        recall = right / max(1, sum(tag != "O" for _, tag in pairs))
        return {
            "overall_precision": precision,
            "overall_recall": recall,
            "overall_f1": 2 * precision * recall / max(1e-9, precision + recall),
            "overall_accuracy": sum(found == tag for found, tag in pairs) / len(pairs),
        }
