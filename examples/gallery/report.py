"""What every script of the gallery does at its end: print a table, and draw a curve where matplotlib is installed."""

import argparse
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from accel import Accelerator


def folder(description: str | None, name: str) -> Path:
    """Read the command line of a script, and return the folder for its results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/gallery") / name, help="where results go")
    path: Path = parser.parse_args().folder
    path.mkdir(parents=True, exist_ok=True)
    return path


def finish(
    accelerator: Accelerator,
    folder: Path,
    title: str,
    rows: Mapping[str, object],
    curves: Mapping[str, Sequence[float]],
) -> None:
    """Print a result once, and draw its curves into `curve.png`.

    Args:
        accelerator: The run's.
        folder: Where the picture goes.
        title: Heading of the table and the picture.
        rows: What was found, by name.
        curves: Values of each step or epoch, by name; `x` holds the numbers of the steps where they are not 1, 2, ...
            Values named `fold` do not follow from one another, and are drawn as bars.
    """
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        width = max(map(len, rows))
        print("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())]))
        if find_spec("matplotlib"):
            draw(folder / "curve.png", title, curves)
    accelerator.end_training()


def draw(path: Path, title: str, curves: Mapping[str, Sequence[float]]) -> None:
    """Draw curves into a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for name, values in curves.items():
        if name == "fold":
            axes.bar(range(1, len(values) + 1), values, label="accuracy")
            axes.set_ylim(0, 1.25)
        elif name != "x":
            axes.plot(curves.get("x", range(1, len(values) + 1)), values, label=name)
    axes.set(title=title, xlabel="fold" if "fold" in curves else "step" if "x" in curves else "epoch")
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
