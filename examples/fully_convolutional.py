r"""A compact fully convolutional network for dense prediction, with dropout of channels where Bayesian SegNet has it: in its middle.

Images are halved `depth` times and doubled again, and what was there at each size is put beside what comes back up (U-Net, Ronneberger
et al. 2015). Any height and width will do. With width 32 and depth 3 it has 1.2 million weights.

    import dubito
    from dubito.data import camvid
    from dubito.data.camvid import VOID
    from fully_convolutional import FullyConvolutional

    likelihood = dubito.HeteroscedasticCategorical(dim=1, ignore_index=VOID, samples=24)     # 11 logits and 11 log variances
    model = dubito.Model(FullyConvolutional(22), likelihood)
    posterior = dubito.fit(model, dubito.MCDropout(epochs=100), camvid("train"), batch_size=12, device="cuda")
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN, STD = 0.4, 0.3  # of the colours of street scenes, roughly


class _Block(nn.Module):
    """Two 3 x 3 convolutions."""

    def __init__(self, inputs: int, outputs: int, *, dilation: int = 1):
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in in (inputs, outputs):
            layers += [nn.Conv2d(fan_in, outputs, 3, padding=dilation, dilation=dilation, bias=False), nn.BatchNorm2d(outputs)]
            layers.append(nn.ReLU())
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class FullyConvolutional(nn.Module):
    """Images [B, inputs, H, W] in [0, 1] to [B, outputs, H, W]; `dropout` drops channels of the two deepest sizes."""

    def __init__(self, outputs: int, *, inputs: int = 3, width: int = 32, depth: int = 3, dropout: float = 0.2):
        super().__init__()
        widths = [width * 2 ** min(i, 2) for i in range(depth + 1)]  # the deepest ones are no wider than four times the first
        self.down = nn.ModuleList(_Block(a, b) for a, b in zip([inputs, *widths], widths[:-1], strict=False))
        self.middle = _Block(widths[-2] if depth else inputs, widths[-1], dilation=2)  # sees further
        self.up = nn.ModuleList(_Block(widths[i + 1] + widths[i], widths[i]) for i in reversed(range(depth)))
        deep = [i >= depth - 2 for i in range(depth)]
        self.drop_down = nn.ModuleList(nn.Dropout2d(dropout) if some and dropout else nn.Identity() for some in deep)
        self.drop_middle = nn.Dropout2d(dropout) if dropout else nn.Identity()
        self.drop_up = nn.ModuleList(nn.Dropout2d(dropout) if some and dropout else nn.Identity() for some in reversed(deep))
        self.head = nn.Conv2d(widths[0], outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, beside = (x - MEAN) / STD, []
        for block, drop in zip(self.down, self.drop_down, strict=True):
            x = drop(block(x))
            beside.append(x)
            x = F.max_pool2d(x, 2, ceil_mode=True)
        x = self.drop_middle(self.middle(x))
        for block, drop in zip(self.up, self.drop_up, strict=True):
            other = beside.pop()
            x = F.interpolate(x, size=other.shape[-2:], mode="bilinear", align_corners=False)
            x = drop(block(torch.cat([x, other], 1)))
        return self.head(x)
