"""The generated documents of a checkout: docs/measurements.md, docs/performance.md, the tables in README.md, the demo's
picture and the plots of measurements."""

from __future__ import annotations

from pathlib import Path

from kt_runtime.bench.page import curves
from kt_runtime.bench.page.markdown import measurements_page, performance_page, with_blocks
from kt_runtime.bench.page.measurement import read_all, read_frame
from kt_runtime.bench.page.timeline import picture, read_timeline
from kt_runtime.errors import InvalidValueError
from kt_runtime.files import errors_of_path, write_file

MEASUREMENTS = Path("docs", "measurements")
PERFORMANCE = Path("docs", "performance.md")
PICTURES = Path("docs", "pictures")
TIMELINE, PICTURE = PICTURES / "demo.json", PICTURES / "demo.svg"


def generated(checkout: Path) -> dict[Path, str]:
    """Path in the checkout -> the content that the JSON files make. Raises InvalidValueError with file and place."""
    measurements = read_all(checkout / MEASUREMENTS)
    frame, readme = read_frame(checkout / MEASUREMENTS), Path("README.md")
    return {
        MEASUREMENTS.with_suffix(".md"): measurements_page(frame, measurements),
        PERFORMANCE: performance_page(frame, measurements),
        readme: with_blocks(_text(checkout / readme), measurements, str(readme)),
        PICTURE: picture(read_timeline(checkout / TIMELINE)),
        **{
            PICTURES / f"{plot.name}.svg": curves.picture(plot) for each in measurements.values() for plot in each.plots
        },
    }


def stale(checkout: Path) -> list[Path]:
    """The generated files whose content is not what the JSON files make."""
    return [path for path, text in generated(checkout).items() if _text(checkout / path, missing="") != text]


def generate(checkout: Path) -> list[Path]:
    """Writes the files that are stale, and returns them."""
    texts = generated(checkout)
    written = stale(checkout)
    for path in written:
        with errors_of_path(checkout / path, "written"):
            write_file(checkout / path, texts[path].encode())
    return written


def check_is_checkout(checkout: Path) -> None:
    if not (checkout / MEASUREMENTS).is_dir():
        raise InvalidValueError(
            f"{checkout.resolve()}: has no {MEASUREMENTS}; name a checkout of kt-runtime with --checkout"
        )


def _text(path: Path, missing: str | None = None) -> str:
    if missing is not None and not path.exists():
        return missing
    with errors_of_path(path, "read"):
        return path.read_text(encoding="utf-8")
