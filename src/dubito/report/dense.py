"""Dense predictions as pictures: input, truth, prediction and both uncertainties side by side, and how well these find errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dubito.apps.dense import Detector, Maps
from dubito.report.canvas import INK, Drawing, grid, line_style, picture, pixels
from dubito.report.content import Picture
from dubito.tensors.checks import require

COLUMNS = ("input", "truth", "prediction", "aleatoric", "epistemic")
POINTS = 400  # of a curve that are drawn


def panels(
    images: Tensor,
    y: Tensor,
    maps: Maps,
    *,
    colours: Sequence[tuple[int, int, int]] | None = None,
    names: Sequence[str] | None = None,
    labels: Sequence[str] = (),
    title: str = "",
    kind: str = "png",
) -> Picture:
    """A row an image: input, truth, prediction, aleatoric and epistemic uncertainty, dark where it is large.

    `images` are [B, H, W], [B, 1, H, W] or [B, 3, H, W] in [0, 1] and `y` [B, H, W] their targets. Classes are shown in `colours`
    (red, green and blue up to 255; targets without one are black), and `names` of those that occur stand below. Each uncertainty
    has one scale for all images, up to its 99.5 % quantile; that of numbers is shown as a standard deviation. `labels` name the rows.

    >>> import dubito
    >>> p = dubito.posteriors.predictive.LatentMixture(dubito.Categorical(dim=1), torch.randn(3, 1, 4, 6, 2))
    >>> from dubito.apps.dense import maps_of
    >>> panels(torch.rand(1, 3, 4, 6), torch.zeros(1, 4, 6).long(), maps_of(p)).alt
    'Dense prediction, 1 image: input, truth, prediction, aleatoric and epistemic uncertainty. The mean is 0... and 0...'
    """
    _check_panels(images, y, maps, labels)
    uncertain = [maps.aleatoric, maps.epistemic] if maps.discrete else [maps.aleatoric.sqrt(), maps.epistemic.sqrt()]
    uncertain = [values.float().cpu() for values in uncertain]
    classes = maps.mean.shape[-1]
    palette = _palette(colours if maps.discrete else None, classes)
    if maps.discrete:
        predicted, truth = palette[maps.prediction.cpu()], palette[_known(y.cpu(), classes)]
        limits: dict[str, float | str] = {}
        present = sorted({int(c) for part in (maps.prediction, y) for c in part.unique() if 0 <= int(c) < classes})
    else:
        predicted, truth = maps.mean[..., 0].cpu(), y.reshape(len(y), *y.shape[-2:]).cpu()
        limits, present = _limits(truth), []
    legend = {} if names is None else {names[c]: "#{:02x}{:02x}{:02x}".format(*palette[c].tolist()) for c in present}
    unit = "nats" if maps.discrete else "as a standard deviation"
    ends = [max(float(torch.quantile(values.flatten()[:: 1 + values.numel() // 2**22], 0.995)), 1e-9) for values in uncertain]

    def _draw(figure: Drawing) -> None:
        every = figure.subplots(len(images), 5, squeeze=False)
        for i, row in enumerate(every):
            row[0].imshow(pixels(images[i]), cmap="gray_r", interpolation="nearest", vmin=0, vmax=1)
            row[1].imshow(truth[i].numpy(), interpolation="nearest", **limits)
            row[2].imshow(predicted[i].numpy(), interpolation="nearest", **limits)
            for axes, values, end in zip(row[3:], uncertain, ends, strict=True):
                axes.imshow(values[i].numpy(), interpolation="nearest", cmap="magma_r", vmin=0, vmax=end)
            for axes in row:
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(True)
            row[0].set_ylabel(labels[i] if labels else "", fontsize=8)
        for axes, name in zip(every[0], COLUMNS, strict=True):
            axes.set_title(name, loc="center", fontsize=9)
        for axes, end in zip(every[-1][3:], ends, strict=True):
            axes.set_xlabel(f"0 to {end:.2g} {unit}", fontsize=7.5)
        if title:
            figure.suptitle(title, fontsize=10, fontweight="bold", color=INK)
        _add_legend(figure, legend)

    means = [float(values.mean()) for values in uncertain]
    alt = (
        f"{title or 'Dense prediction'}, {len(images)} image{'s' if len(images) > 1 else ''}: input, truth, prediction, aleatoric and "
        f"epistemic uncertainty. The mean is {means[0]:.3f} and {means[1]:.3f}."
    )
    height = 1.7 * images.shape[-2] / images.shape[-1] + 0.08
    below = 0.35 + (0.3 if legend else 0.0) + (0.3 if title else 0.0)
    return picture(_draw, (8.9, len(images) * height + 0.25 + below), alt=alt, kind=kind)


def _check_panels(images: Tensor, y: Tensor, maps: Maps, labels: Sequence[str]) -> None:
    same = 0 < len(images) == len(y) == len(maps.total) and images.shape[-2:] == y.shape[-2:]
    shapes = [list(tensor.shape) for tensor in (images, y, maps.total)]
    require(same, f"images, targets and maps must be of the same images; got the shapes {shapes[0]}, {shapes[1]} and {shapes[2]}")
    require(not labels or len(labels) == len(images), f"labels must be one per image; got {len(labels)} for {len(images)} images")


def _limits(truth: Tensor) -> dict[str, float | str]:
    """The colour scale of numbers: from the smallest to the largest target."""
    known = truth[truth.isfinite()]
    low, high = (float(known.min()), float(known.max())) if known.numel() else (0.0, 1.0)
    return {"vmin": low, "vmax": high, "cmap": "viridis"}


def _add_legend(figure: Drawing, colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    if colours:
        patches = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=min(11, len(patches)), fontsize=7.5, handlelength=1.2)


def detection(title: str, detectors: Mapping[str, Detector], *, kind: str = "svg") -> Picture:
    """How well scores find errors, by label: precision over recall, and the share of errors among the most certain pixels.

    >>> one = Detector()
    >>> one.add(torch.tensor([0.1, 0.4, 0.5, 2.0]), torch.tensor([False, True, False, True]))
    >>> detection("A few pixels", {"total": one}).alt
    'A few pixels: average precision of errors by total 0.83, where chance has 0.50.'
    """
    require(detectors, f"no curves for the figure {title!r}")
    pairs = {label: (one.precision_recall(), one.kept()) for label, one in detectors.items()}
    areas = {label: one.average_precision for label, one in detectors.items()}
    chance = float(next(iter(pairs.values()))[1][1][-1])

    def _draw(figure: Drawing) -> None:
        left, right = figure.subplots(1, 2)
        for i, (label, ((precision, recall), (coverage, risk))) in enumerate(pairs.items()):
            some = _spaced(recall)
            some = some[recall[some] > 0.005]  # of the very first pixels the share is chance
            left.plot(recall[some], precision[some], label=f"{label} · {areas[label]:.3f}", **line_style(i))
            some = _spaced(coverage)
            some = some[coverage[some] > 0.01]
            right.plot(coverage[some], 1 - risk[some], label=label, **line_style(i))
        left.axhline(chance, color=INK, linewidth=0.8, linestyle=":")
        left.set(
            xlim=(0, 1), ylim=(0, 1), title=title, xlabel="share of the errors that are found", ylabel="share of errors here"
        )
        right.set(xlim=(0, 1), xlabel="share of pixels kept, the most certain ones", ylabel="accuracy of these")
        for axes in (left, right):
            grid(axes)
        left.legend(loc="upper right", handlelength=2.6, fontsize=8)

    words = ", ".join(f"{label} {area:.2f}" for label, area in areas.items())
    alt = f"{title}: average precision of errors by {words}, where chance has {chance:.2f}."
    return picture(_draw, (7.6, 3.1), alt=alt, kind=kind)


def _palette(colours: Sequence[tuple[int, int, int]] | None, classes: int) -> Tensor:
    """Colours [classes + 1, 3] as bytes; the last is for targets that are no class."""
    if colours is None:
        from matplotlib import colormaps

        given = torch.tensor([colormaps["tab20"](c % 20)[:3] for c in range(classes)]).mul(255).round()
    else:
        given = torch.tensor(list(colours))[:classes]
    require(len(given) == classes, f"colours must be one per class; got {len(given)} for {classes} classes")
    return torch.cat([given.to(torch.uint8), torch.zeros(1, 3, dtype=torch.uint8)])


def _known(y: Tensor, classes: int) -> Tensor:
    return torch.where((y >= 0) & (y < classes), y, classes).long()


def _spaced(values: Tensor) -> Tensor:
    """Positions of about as many points, evenly spaced in the values."""
    return torch.searchsorted(values, torch.linspace(0, 1, POINTS, dtype=values.dtype)).clamp_max(len(values) - 1).unique()
