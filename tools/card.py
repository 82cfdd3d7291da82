"""The picture that a link to the site shows elsewhere: the front figure of README.md on a card of 1200 by 630 pixels.

    python tools/card.py [FILE]     _proc/card.png by default; `make docs` runs it before Quarto
"""
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
SIZE, MARGIN = (1200, 630), 24


def card(figure):
    "A figure, scaled to fit, in the middle of a white card."
    picture = figure.convert("RGB")
    picture.thumbnail([side - 2 * MARGIN for side in SIZE], Image.Resampling.LANCZOS)
    made = Image.new("RGB", SIZE, "white")
    made.paste(picture, [(side - own) // 2 for side, own in zip(SIZE, picture.size)])
    return made.quantize(64)


def main(args=()):
    to = Path(args[0] if args else ROOT / "_proc" / "card.png")
    card(Image.open(ROOT / "README_files" / "fig-front.png")).save(to, optimize=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
