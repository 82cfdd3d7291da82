"""Looks at every figure that a notebook draws: no two tick labels overlap, and each can be read on a phone.

A page stores pictures, in which nobody can look for labels any more, so they are measured while they are drawn.
Matplotlib does it by itself where MATPLOTLIBRC names this folder (`figure.hooks` in tools/matplotlibrc) and this folder
is on PYTHONPATH; what is wrong is added to the file that TICKS names. `make outputs` stores no page with such a figure.

On a phone the site shows a picture at no less than `SHRUNK` of its size (tools/after.py), and whole where it is narrow.
"""
import os
from itertools import combinations
from pathlib import Path

import numpy as np
from matplotlib.axis import Axis

SHRUNK = .65            # of its size, at least
PHONE = 360             # px that a picture has on a phone of 390
LEGIBLE = 6             # px, the size of a font


def ticks(fig):
    "The tick labels that a drawn figure shows."
    for axis in fig.findobj(Axis):
        if not (axis.get_visible() and axis.axes.get_visible() and axis.axes.axison): continue
        drawn = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        ends = axis.get_transform().transform(np.array(axis.get_view_interval(), dtype=float))
        room = 1e-6 * abs(ends[1] - ends[0])
        for tick in drawn:
            at = axis.get_transform().transform(np.array([tick.get_loc()], dtype=float))[0]
            if not tick.get_visible() or not min(ends) - room <= at <= max(ends) + room: continue
            yield from (t for t in (tick.label1, tick.label2) if t.get_visible() and t.get_text().strip())


def turned(text, renderer):
    "Centre, width and height of a text in its own direction, and this direction in degrees."
    box, angle = text.get_window_extent(renderer), text.get_rotation()
    flat = box
    if angle % 180:     # a box around a slanting text is larger than the text
        text.set_rotation(0)
        flat = text.get_window_extent(renderer)
        text.set_rotation(angle)
    turn = np.deg2rad(angle)
    x, y = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
    return np.array([x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)]), flat.size, angle


def overlap(a, b):
    "Whether two texts of one direction lie on each other; those of an axis have one."
    (at, size, angle), (other, far, turn) = a, b
    return angle == turn and bool((np.abs(at - other) < (size + far) / 2).all())


def faults(fig, renderer):
    "What is wrong with the tick labels of a figure that has just been drawn, as sentences."
    shown = [(t, turned(t, renderer)) for t in ticks(fig)]
    found = [f"the ticks {a.get_text()!r} and {b.get_text()!r} overlap"
             for (a, its), (b, others) in combinations(shown, 2) if overlap(its, others)]
    width = fig.get_figwidth() * 100        # px, of which a page makes an inch a hundred
    for size in {t.get_fontsize() for t, _ in shown}:
        px = size * 100 / 72 * min(1, max(SHRUNK, PHONE / width))
        if px < LEGIBLE: found.append(f"ticks of {size:g} pt are {px:.1f} px high on a phone, less than {LEGIBLE}")
    return found


def watch(fig):
    "What matplotlib calls with every new figure."
    def drawn(event):
        if path := os.environ.get("TICKS"):
            said = f"{Path.cwd().name}, {fig.axes[0].get_title() or fig.axes[0].get_ylabel()!r}" if fig.axes else ""
            with open(path, "a", encoding="utf-8") as out:
                out.writelines(f"{said}: {fault}\n" for fault in faults(fig, event.renderer))
    fig.canvas.mpl_connect("draw_event", drawn)
