"""Makes the pictures in notebooks a third as large: 256 colours are more than a figure of lines and dots has.

    python tools/pictures.py NB...    in place; a picture that would not get smaller by a fifth stays as it is
"""
import base64
import io
import sys

import nbformat
from PIL import Image
from moe_redistribution.basics.files import write_whole


def smaller(png):
    "The same picture (base64 of a PNG) with at most 256 colours, or itself if that is hardly smaller."
    picture = Image.open(io.BytesIO(base64.b64decode(png)))
    if picture.mode == "P":
        return png
    white = Image.new("RGBA", picture.size, "white")
    flat = Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    flat.quantize(256, Image.Quantize.MEDIANCUT,
                  dither=Image.Dither.NONE).save(out := io.BytesIO(), "PNG", optimize=True)
    new = base64.b64encode(out.getvalue()).decode()
    return new if len(new) < .8 * len(png) else png


def main(paths):
    for path in paths:
        nb = nbformat.read(path, as_version=4)
        data = [o["data"] for c in nb.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
        new = [smaller(d["image/png"].replace("\n", "")) for d in data]
        if all(d["image/png"].replace("\n", "") == n for d, n in zip(data, new)):
            continue
        for d, n in zip(data, new):
            d["image/png"] = n
        write_whole(path, (nbformat.writes(nb, indent=1) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1:])
