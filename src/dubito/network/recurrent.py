"""Recurrent layers written out step by step, so that `vmap` and variational dropout can enter them.

`nn.LSTM`, `nn.GRU` and `nn.RNN` call one fused function each, `torch._VF.lstm` and so on. These have no batching rule,
so they cannot run with a stack of weights, and no place for a mask on the recurrent state. `unrolled` takes their
arguments as they are and returns what they return. `PLAIN` has all that `torch.func` cannot enter in plain torch: the
recurrences, and the packing of sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# torch's fused functions, by the name of their kind
RECURRENT = {getattr(torch._VF, kind): kind for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")}

Mask = Callable[[str, tuple[int, ...]], Tensor | None]
State = tuple[Tensor, ...]  # (h, c) for the LSTM, (h,) for the others
Step = Callable[..., State]  # (projected input, masked h, *state) -> state
Cell = tuple[Tensor, Tensor | None, Step]  # input weight, bias of the input product, step


def unrolled(kind: str, args: tuple[Any, ...], mask: Mask | None = None) -> tuple[Tensor, ...]:
    r"""`torch._VF.<kind>(*args)` in plain torch, with masks that stay the same at every time step.

    With an input mask $m^x$ and a recurrent mask $m^h$ per layer (Gal and Ghahramani, 2016), all layers see
    $\tilde x_t = m^x \odot x_t$ and $\tilde h_{t-1} = m^h \odot h_{t-1}$, here with biases left out:

    $$\text{rnn:}\quad h_t = \phi(W \tilde x_t + U \tilde h_{t-1})$$
    $$\text{lstm:}\quad (i, f, g, o) = W \tilde x_t + U \tilde h_{t-1}, \quad
      c_t = \sigma(f) \odot c_{t-1} + \sigma(i) \odot \tanh(g), \quad h_t = \sigma(o) \odot \tanh(c_t)$$
    $$\text{gru:}\quad (r, z) = \sigma(W_{rz} \tilde x_t + U_{rz} \tilde h_{t-1}), \quad
      n = \tanh(W_n \tilde x_t + r \odot U_n \tilde h_{t-1}), \quad h_t = (1 - z) \odot n + z \odot h_{t-1}$$

    The mask is only on what enters a matrix product: the LSTM's $c$ and the GRU's last $h_{t-1}$ are not masked. So a
    recurrent mask shared by the batch is the same as $U \operatorname{diag}(m^h)$, which torch's own function can run.

    Args:
        kind: `"lstm"`, `"gru"`, `"rnn_tanh"` or `"rnn_relu"`.
        args: The positional arguments of `torch._VF.<kind>`, padded or packed. Its `dropout` and `training` are not
            used: what is dropped is for `mask` to say.
        mask: `mask(site, shape)` gives a factor that broadcasts to `shape`, already divided by the keep probability, or
            None. It is asked once a call for each site: `"input{layer}"` with `[B, F]`, shared by both directions, then
            `"hidden{layer}"` and `"hidden{layer}.reverse"` with `[B, H]`, or `[B, proj_size]`. B counts sequences;
            those of a `PackedSequence` come in its own sorted order.

    Returns:
        `(output, h_n, c_n)` for the LSTM, `(output, h_n)` for the others, in torch's shapes.

    >>> net, x = torch.nn.GRU(3, 4), torch.randn(5, 2, 3)  # T = 5, B = 2
    >>> args = (x, torch.zeros(1, 2, 4), net._flat_weights, True, 1, 0.0, False, False, False)
    >>> output, h_n = unrolled("gru", args)
    >>> torch.allclose(output, net(x)[0], atol=1e-6)
    True
    >>> unrolled("gru", args, lambda site, shape: torch.rand(shape).lt(0.5) / 0.5)[0].shape
    torch.Size([5, 2, 4])
    """
    packed = not isinstance(args[3], bool)  # the padded form has `bias` there, the packed one the weights
    if packed:
        data, batch_sizes, hx, weights, bias, layers, _, _, bidirectional = args  # data [N, F], N = sum of lengths
        sizes: list[int] = batch_sizes.tolist()  # running sequences at each step, never growing
        batch_first = False
    else:
        x, hx, weights, bias, layers, _, _, bidirectional, batch_first = args
        x = x.transpose(0, 1) if batch_first else x  # [T, B, F]
        sizes = [x.shape[1]] * x.shape[0]
        data = x.flatten(0, 1)  # [T B, F], so a padded batch is a packed one whose sequences all end together

    initial = tuple(hx) if kind == "lstm" else (hx,)  # each [layers * directions, B, H]
    states = list(zip(*(part.unbind(0) for part in initial), strict=True))
    batch = initial[0].shape[1]
    directions = ("", ".reverse") if bidirectional else ("",)
    per_cell = len(weights) // len(states)
    finals: list[State] = []

    for layer in range(layers):
        if mask is not None:
            data = _mask_input(data, mask(f"input{layer}", (batch, data.shape[1])), sizes)
        outputs: list[Tensor] = []
        for direction in directions:
            cell = len(finals)
            w, b, step = _CELLS[kind](weights[cell * per_cell : (cell + 1) * per_cell], bias)
            state = states[cell]
            drop = None if mask is None else mask(f"hidden{layer}{direction}", (batch, state[0].shape[1]))
            drop = None if drop is None else drop.expand(batch, state[0].shape[1])
            inputs = functional.linear(data, w, b).split(sizes)  # T of [b_t, gates H]: one product for all steps
            output, final = (_scan_reversed if direction else _scan)(step, inputs, state, drop)
            outputs.append(output)
            finals.append(final)
        data = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)  # [N, directions * H]

    ends = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
    if packed:
        return data, *ends
    output = data.unflatten(0, (len(sizes), batch))  # [T, B, directions * H]
    return output.transpose(0, 1) if batch_first else output, *ends


def _mask_input(data: Tensor, mask: Tensor | None, sizes: list[int]) -> Tensor:
    """The rows of every step times the rows of the mask whose sequences still run."""
    if mask is None:
        return data
    if sizes[0] == sizes[-1]:  # broadcast over time, so that no mask of the data's size is kept for the gradient
        return (data.unflatten(0, (len(sizes), sizes[0])) * mask).flatten(0, 1)
    mask = mask.expand(sizes[0], data.shape[1])
    return data * torch.cat([mask[:b] for b in sizes])  # [N, F]


def _scan(step: Step, inputs: tuple[Tensor, ...], state: State, mask: Tensor | None) -> tuple[Tensor, State]:
    """First step to last. Sequences are sorted by length, so those that end are the last rows: set them aside."""
    outputs, ended, running = [], [], state[0].shape[0]
    for x in inputs:
        if (b := x.shape[0]) != running:
            ended.append(tuple(part[b:] for part in state))
            state = tuple(part[:b] for part in state)
            mask = None if mask is None else mask[:b]
            running = b
        state = step(x, state[0] if mask is None else state[0] * mask, *state)
        outputs.append(state[0])
    if ended:
        state = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
    return torch.cat(outputs), state  # [N, H], each [B, H]


def _scan_reversed(step: Step, inputs: tuple[Tensor, ...], state: State, mask: Tensor | None) -> tuple[Tensor, State]:
    """Last step to first. A shorter sequence joins, with its initial state, at its own last step."""
    running = inputs[-1].shape[0]
    start, state = state, tuple(part[:running] for part in state)
    drop = None if mask is None else mask[:running]
    outputs = []
    for x in reversed(inputs):
        if (b := x.shape[0]) != running:
            state = tuple(torch.cat([part, new[running:b]]) for part, new in zip(state, start, strict=True))
            drop = None if mask is None else mask[:b]
            running = b
        state = step(x, state[0] if drop is None else state[0] * drop, *state)
        outputs.append(state[0])
    return torch.cat(outputs[::-1]), state  # [N, H], each [B, H]


# The cells. Torch keeps two biases; they are added once, ahead of the steps, wherever nothing comes between them.


def _lstm(weights: list[Tensor], bias: bool) -> Cell:
    w, u = weights[0], weights[1].t().contiguous()  # [4H, F], [H or proj, 4H]; the copy halves the time of a step
    size = w.shape[0] // 4
    project = weights[-1].t() if len(weights) in (3, 5) else None  # [H, proj]

    def step(x: Tensor, masked: Tensor, h: Tensor, c: Tensor) -> State:
        """(h, c) after one step."""
        gates = x + masked @ u  # [B, 4H]
        i_f, g, o = gates.split((2 * size, size, size), 1)
        i, f = i_f.sigmoid().chunk(2, 1)
        c = torch.addcmul(f * c, i, g.tanh())
        h = o.sigmoid() * c.tanh()
        return h if project is None else h @ project, c

    return w, weights[2] + weights[3] if bias else None, step


def _gru(weights: list[Tensor], bias: bool) -> Cell:
    w, u = weights[0], weights[1].t().contiguous()  # [3H, F], [H, 3H]
    size = u.shape[0]
    b_x, b_n = None, None
    if bias:  # r multiplies n's part of the recurrent bias, so that part stays in the step
        b_rz, b_n = weights[3].split((2 * size, size))
        b_x = weights[2] + functional.pad(b_rz, (0, size))

    def step(x: Tensor, masked: Tensor, h: Tensor) -> State:
        """h after one step."""
        x_rz, x_n = x.split((2 * size, size), 1)
        h_rz, h_n = (masked @ u).split((2 * size, size), 1)
        r, z = (x_rz + h_rz).sigmoid().chunk(2, 1)
        n = torch.addcmul(x_n, r, h_n if b_n is None else h_n + b_n).tanh()
        return (torch.addcmul(n, z, h - n),)

    return w, b_x, step


def _rnn(activation: Callable[[Tensor], Tensor], weights: list[Tensor], bias: bool) -> Cell:
    w, u = weights[0], weights[1].t().contiguous()  # [H, F], [H, H]

    def step(x: Tensor, masked: Tensor, h: Tensor) -> State:
        """h after one step."""
        return (activation(x + masked @ u),)

    return w, weights[2] + weights[3] if bias else None, step


_CELLS: dict[str, Callable[[list[Tensor], bool], Cell]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": partial(_rnn, torch.tanh),
    "rnn_relu": partial(_rnn, torch.relu),
}


def packed(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """`torch._VF._pack_padded_sequence`: the steps of sequences sorted by length, [N, *], and how many run at each step."""
    x, ends = x.transpose(0, 1) if batch_first else x, lengths.tolist()
    sizes = [sum(end > t for end in ends) for t in range(max(ends))]
    return torch.cat([x[t, :b] for t, b in enumerate(sizes)]), torch.tensor(sizes)


def padded(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """`torch._VF._pad_packed_sequence`: the inverse of `packed`, filled up to at least `total_length` steps, and the lengths.

    >>> x = torch.arange(6.0).view(2, 3, 1)  # B = 2, T = 3
    >>> data, sizes = packed(x, torch.tensor([3, 1]), True)
    >>> padded(data, sizes, True, -1.0, 4)[0].squeeze(-1)
    tensor([[ 0.,  1.,  2., -1.],
            [ 3., -1., -1., -1.]])
    """
    sizes: list[int] = batch_sizes.tolist()
    batch, rest = sizes[0], data.shape[1:]
    steps = [
        torch.cat([step, step.new_full((batch - b, *rest), padding_value)])
        for step, b in zip(data.split(sizes), sizes, strict=True)
    ]
    steps += [data.new_full((batch, *rest), padding_value)] * (total_length - len(sizes))
    lengths = torch.tensor([sum(b > i for b in sizes) for i in range(batch)])
    return torch.stack(steps, int(batch_first)), lengths


def _recurrence(kind: str) -> Callable[..., Any]:
    return lambda *args: unrolled(kind, args)


# what stands for each function that `torch.func` cannot enter, with the same arguments
PLAIN: dict[Callable, Callable[..., Any]] = {
    **{func: _recurrence(kind) for func, kind in RECURRENT.items()},
    torch._VF._pack_padded_sequence: packed,
    torch._VF._pad_packed_sequence: padded,
}
