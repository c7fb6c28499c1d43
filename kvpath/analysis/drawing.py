"""A picture of a layout: who makes what, what of it is stored, and who reads it."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvpath.attention.accounting import read_elements, stored_elements
from kvpath.attention.layout import Layout, Read, Slot
from kvpath.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY = "#8a94a3"
COLOURS = ("#2f6db3", "#d9822b", "#3a9256", "#b2454f", "#7a5aa8", "#2a9d9d", "#a8762f", "#c05a95")
ROW = 1.0
BOX = 0.56


def draw(layout: Layout, file: Path, title: str) -> None:
    """Draw the layers from the bottom up as a PNG.

    A box is a slot, as wide as its elements: filled if stored, dashed if it lives for one pass. A slot that later
    layers read has a colour, one for each family of layers that read from one another, and an arrow to each reader,
    where a pale box shows the columns that are read.

    Args:
        layout: what to draw.
        file: where to write the PNG.
        title: what the model is called.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("drawing needs matplotlib: pip install 'kvpath[demo]'") from error
    figure = Figure(figsize=(9, 1.7 + 0.36 * len(layout.layers)), layout="constrained")
    FigureCanvasAgg(figure)
    _Picture(layout, figure.add_subplot()).draw(title)
    try:
        figure.savefig(file, dpi=110, format="png", pil_kwargs={"optimize": True})
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error


class _Picture:
    """Slots of one name share a column, so that a line to a reader goes straight up."""

    def __init__(self, layout: Layout, axes: "Axes") -> None:
        self.layout, self.axes = layout, axes
        self.widths: dict[str, int] = {}
        self.labels: dict[str, Slot] = {}
        for _, name, slot in layout.slots():
            if slot.elements > self.widths.get(name, 0):
                self.widths[name], self.labels[name] = slot.elements, slot
        # Wide enough for the labels below narrow columns.
        total = sum(self.widths.values())
        self.gap, narrowest = 0.03 * total, 0.09 * total
        self.left: dict[str, float] = {}
        self.room: dict[str, float] = {}
        edge = 0.0
        for name, width in self.widths.items():
            self.room[name] = max(width, narrowest)
            self.left[name] = edge + (self.room[name] - width) / 2
            edge += self.room[name] + self.gap
        self.right = edge - self.gap
        families = _families(layout)
        order = {
            family: index for index, family in enumerate(dict.fromkeys(families[o] for o, _ in layout.last_readers))
        }
        self.colours = {
            (owner, name): COLOURS[order[families[owner]] % len(COLOURS)] for owner, name in layout.last_readers
        }

    def draw(self, title: str) -> None:
        """Everything, onto the axes."""
        for layer, entry in enumerate(self.layout.layers):
            for read in entry.reads:
                if read.name not in entry.makes:
                    self._pale_box(layer, read)
        for layer, name, slot in self.layout.slots():
            self._box(layer, name, slot)
        for owner, name in self.colours:
            self._lines(owner, name)
        self._text(title)

    def _box(self, layer: int, name: str, slot: Slot) -> None:
        from matplotlib.patches import Rectangle

        colour = self.colours.get((layer, name), GREY)
        self.axes.add_patch(
            Rectangle(
                (self.left[name], layer * ROW - BOX / 2),
                slot.elements,
                BOX,
                facecolor=colour if slot.cached else "white",
                edgecolor=colour,
                linestyle="-" if slot.cached else (0, (3, 2)),
                linewidth=1.2,
                zorder=2,
            )
        )
        if slot.window is not None:
            self.axes.annotate(
                f"last {slot.window}",
                (self.left[name] + slot.elements / 2, layer * ROW),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if slot.cached else colour,
                zorder=5,
            )

    def _pale_box(self, layer: int, read: Read) -> None:
        from matplotlib.patches import Rectangle

        slot = self.layout.slot(read.owner, read.name)
        first, end = read.columns or (0, slot.dim)
        self.axes.add_patch(
            Rectangle(
                (self.left[read.name] + first * slot.heads, layer * ROW - BOX / 2),
                (end - first) * slot.heads,
                BOX,
                facecolor=self.colours[read.owner, read.name],
                alpha=0.16,
                zorder=1,
            )
        )

    def _lines(self, owner: int, name: str) -> None:
        """One line up from the owner, with an arrow into each reader."""
        colour = self.colours[owner, name]
        crossing = [
            other
            for other, same in self.colours
            if same == name and other < self._last(owner, name) and owner < self._last(other, name)
        ]
        share = (crossing.index(owner) + 1) / (len(crossing) + 1)
        x = self.left[name] + share * self.layout.slot(owner, name).elements
        start = owner * ROW + BOX / 2
        for layer in range(owner + 1, self._last(owner, name) + 1):
            if any((read.owner, read.name) == (owner, name) for read in self.layout.layers[layer].reads):
                self.axes.annotate(
                    "",
                    xy=(x, layer * ROW - BOX / 2),
                    xytext=(x, start),
                    arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0},
                    zorder=3,
                )

    def _last(self, owner: int, name: str) -> int:
        return self.layout.last_readers[owner, name]

    def _text(self, title: str) -> None:
        layers = self.layout.layers
        for name, slot in self.labels.items():
            middle = self.left[name] + self.widths[name] / 2
            self.axes.text(middle, -0.75, f"{name}\n{slot.heads} x {slot.dim}", ha="center", va="top", fontsize=8)
        for layer in range(len(layers)):
            own = sum(slot.elements for slot in layers[layer].makes.values() if slot.cached)
            touched = sum(
                self.layout.slot(*key).heads * len(columns) for key, columns in self.layout.touched(layer).items()
            )
            self.axes.text(-self.gap, layer * ROW, f"layer {layer}", ha="right", va="center", fontsize=8)
            for column, value in enumerate((own, touched)):
                x = self.right + self.gap * (3 + 3.2 * column)
                self.axes.text(x, layer * ROW, f"{value:,}", ha="right", va="center", fontsize=8, color="#444")
        for column, word in enumerate(("stores", "reads")):
            x = self.right + self.gap * (3 + 3.2 * column)
            self.axes.text(x, len(layers) - 0.45, word, ha="right", va="center", fontsize=8, color="#444")
        stored, read = stored_elements(self.layout), read_elements(self.layout)
        windows = " while windows fill" if any(slot.window for _, _, slot in self.layout.slots()) else ""
        self.axes.set_title(
            f"{title}: {stored:,} elements stored and {read:,} read per token{windows}",
            loc="left",
            fontsize=10,
            pad=10,
        )
        self.axes.set_xlim(-4 * self.gap, self.right + 7 * self.gap)
        self.axes.set_ylim(-2.4, len(layers) - 0.2)
        self.axes.axis("off")
        self.axes.text(
            0,
            -2.2,
            "filled: stored    dashed: for one pass only    pale: read from below    colour: read by later layers",
            fontsize=7.5,
            color="#555",
        )


def _families(layout: Layout) -> list[int]:
    """For each layer, the lowest one that it reads from, directly or through others."""
    families: list[int] = []
    for layer, entry in enumerate(layout.layers):
        families.append(min((families[read.owner] for read in entry.reads), default=layer))
    return families
