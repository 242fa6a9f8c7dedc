"""What makes a picture hard to read: more inches than a page shows, small words, words on words, a panel for one number,
marks whose filling nothing explains."""

import re

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

WIDEST, SMALLEST = 10.2, 7.0  # inches, points: at a notebook's 1,000 pixels 7 points are 9 pixels high
_ALLOWED = 2.0  # pixels that two words may share: boxes are a little larger than the letters


def faults(figure: Figure) -> list[str]:
    """Every fault in words; an empty list for a legible figure."""
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    width = figure.get_tightbbox(renderer).width
    found = [f"{width:.1f} inches wide"] if width > WIDEST else []
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    outside = _outside(figure)
    shown = [text for text in shown if text not in outside and (text.axes is None or text.axes.get_visible())]
    found += [
        f"{text.get_fontsize():g} points: {text.get_text()!r}" for text in shown if text.get_fontsize() < SMALLEST
    ]
    upright = [text for text in shown if text.get_rotation() % 90 == 0]  # boxes of slanted words overlap
    boxes = np.array([text.get_window_extent(renderer).extents for text in upright]).reshape(-1, 4)
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    shared = np.minimum(high, high.swapaxes(0, 1)) - np.maximum(low, low.swapaxes(0, 1))
    pairs = np.argwhere(np.triu((shared > _ALLOWED).all(axis=-1), 1))
    found += [f"{upright[one].get_text()!r} on {upright[other].get_text()!r}" for one, other in pairs]
    return found + _lonely(figure) + _unexplained(figure, shown)


def _lonely(figure: Figure) -> list[str]:
    """Panels that show one number: a sentence would do. An image has several."""
    found = []
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_transform() == axes.transData and len(line.get_xdata())]
        places = {tuple(place) for line in lines for place in line.get_xydata() if np.isfinite(place).all()}
        bars = [bar for bar in axes.patches if getattr(bar, "get_height", float)() and bar.get_width()]
        others = (
            sum(max(len(each.get_offsets()), np.size(each.get_array())) for each in axes.collections)
            + 2 * len(axes.images)
            + len(axes.texts)
        )
        if axes.get_visible() and axes.has_data() and len(places) + len(bars) + others < 2:
            found.append(f"one number in the panel {axes.get_title() or axes.get_ylabel()!r}")
    return found


def _unexplained(figure: Figure, shown: list[Text]) -> list[str]:
    """Filled and hollow marks in one figure, where neither legend nor words say what is which."""
    marked = [line for axes in figure.axes if axes.get_visible() for line in axes.lines if _is_marked(line)]
    hollow = [line for line in marked if _is_hollow(line)]
    if not hollow or len(hollow) == len(marked):
        return []
    legends = [legend for axes in figure.axes if (legend := axes.get_legend())] + figure.legends
    handles = [each for legend in legends for handle in legend.legend_handles for each in handle.findobj(Line2D)]
    words = " ".join(text.get_text() for text in shown).lower()
    if re.search(r"hollow|filled", words) or any(_is_marked(each) and _is_hollow(each) for each in handles):
        return []
    return ["hollow marks beside filled ones, which nothing explains"]


def _is_marked(line: Line2D) -> bool:
    return len(line.get_xdata()) > 0 and line.get_marker() not in ("", " ", "None", None, ".", ",", "x", "+", "|", "_")


def _is_hollow(line: Line2D) -> bool:
    return line.get_fillstyle() == "none" or str(line.get_markerfacecolor()) in ("none", "white")


def _outside(figure: Figure) -> set[Text]:
    """Labels of ticks beyond the ends of their axis: objects, but in no picture."""
    found: set[Text] = set()
    for axis in (axis for axes in figure.findobj(Axes) for axis in (axes.xaxis, axes.yaxis)):
        drawn = axis._update_ticks()  # those that the axis would draw; it has no public name
        ticks = {*axis.majorTicks, *axis.minorTicks} - set(drawn if axis.get_visible() else ())
        found |= {label for tick in ticks for label in (tick.label1, tick.label2)}
    return found
