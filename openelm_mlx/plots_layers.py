"""Chart of layer-wise scaling: how wide each layer of a model is, and what it costs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from openelm_mlx.plots import Picture, line_look, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Layered(Protocol):
    """What is drawn of :class:`openelm_mlx.ModelArgs`: one number a layer each."""

    @property
    def num_query_heads(self) -> Sequence[int]:
        """Query heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def ffn_dims(self) -> Sequence[int]:
        """Inner widths of the feed-forward networks."""

    @property
    def layer_parameters(self) -> Sequence[int]:
        """Parameters."""


def plot_layers(
    models: Mapping[str, Layered],
    path: str | Path,
    *,
    title: str = "Layer-wise scaling",
    overwrite: bool = True,
) -> Picture:
    """Draw query width, feed-forward width and parameters over the layers of some models.

    Args:
        models: name -> architecture.
        path: of the PNG.
        title: above the chart.
        overwrite: replace a file that is there.

    Raises:
        ValueError: if matplotlib is missing, naming the extra.
    """
    return save_figure(layers_figure(models, title=title), path, overwrite=overwrite)


def layers_figure(models: Mapping[str, Layered], *, title: str) -> "Figure":
    """The figure of :func:`plot_layers`."""
    figure = new_figure(height=7.0)
    query, ffn, parameters = figure.subplots(3, 1, sharex=True)
    for number, (name, args) in enumerate(models.items()):
        look = line_look(number)
        layers = range(1, len(args.layer_parameters) + 1)
        query.plot(layers, [h * args.head_dim for h in args.num_query_heads], label=name, **look)
        ffn.plot(layers, args.ffn_dims, label=name, **look)
        millions = [count / 1e6 for count in args.layer_parameters]
        parameters.plot(layers, millions, label=name, **look)
    query.set(title=title, ylabel="query width")
    ffn.set_ylabel("feed-forward width")
    parameters.set(xlabel="layer, counted from the input", ylabel="parameters (millions)")
    for axes in (query, ffn, parameters):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    query.legend()
    return figure
