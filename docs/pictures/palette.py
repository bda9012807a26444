"""Pictures as small files: PNGs with a palette of 64 colours, replaced only where something else is drawn."""

from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

COLOURS = 64


def reduce(path: Path) -> None:
    """Rewrites a PNG with a palette; its description stays."""
    with Image.open(path) as picture:
        info, colours = PngInfo(), picture.convert("RGB")
        if description := picture.info.get("Description"):
            info.add_text("Description", description)
    few = colours.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(path, optimize=True, pnginfo=info)


def replace(new: Path, kept: Path) -> bool:
    """Puts a picture in place of the kept one, reduced, unless that shows the same; whether it did."""
    if new.suffix == ".png":
        reduce(new)
    if kept.exists() and _content(new) == _content(kept):
        return False
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(new.read_bytes())
    return True


def _content(path: Path) -> object:
    if path.suffix != ".png":
        return path.read_bytes()
    with Image.open(path) as picture:
        return picture.size, picture.info.get("Description"), picture.convert("RGB").tobytes()
