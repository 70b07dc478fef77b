r"""Whole trajectories of a small network, leapfrog or microcanonical, in one launch: one program (thread block) a chain.

A program keeps its chain's weights, momenta and gradient on chip from the first step to the last: in registers, as vectors [PP], where
they are moved; and, to hand them from one arrangement over threads to another, in the chain's own rows of `q` and `g`, which stay
in the cache. The data are read anew at every step, from cache too. A bias of the first layer is one more column of its weights, whose
inputs are 1. All sizes are padded to powers of two (HP for H) with weights and inputs of 0.

Energies are summed in float64. Matrix products are float32, or, where `relu_by_warp` says so, made of shorter ones.
"""

# pyright: reportPossiblyUnboundVariable=false, reportOptionalOperand=false
# Triton's `if` on constants decides at compile time.

from __future__ import annotations

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    jit = triton.jit
except ImportError:  # it comes with torch for GPUs only; without it nothing here is ever called

    def jit(function=None, **options):
        """The function as it is, where Triton is not there."""
        return function or (lambda one: one)


@jit
def activate(a, ACTIVATION: tl.constexpr):
    """The activation and its slope. The exponential is the hardware's, within 1e-6."""
    if ACTIVATION == "relu":
        h = tl.maximum(a, 0.0)
        slope = tl.where(a > 0, 1.0, 0.0)
    elif ACTIVATION == "tanh":
        h = 1 - 2 / (1 + tl.exp(2 * a))
        slope = 1 - h * h
    elif ACTIVATION == "silu":
        s = 1 / (1 + tl.exp(-a))
        h = a * s
        slope = s * (1 + a - h)
    else:  # gelu
        s = 0.5 + 0.5 * tl.erf(a * 0.7071067811865476)
        h = a * s
        slope = s + a * 0.3989422804014327 * tl.exp(-0.5 * a * a)
    return h, slope


@jit
def relu_by_warp(
    x, y, n, w, u, c, DP: tl.constexpr, HP: tl.constexpr, WARPS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    r"""One hidden layer of ReLU: G, sum of r and sum of r^2, where the gradients are u G for the weights and the row sums of W G for u.

    The data are dealt to the warps, as a batch of small matrix products, so that a warp needs no other between its data and its share

    .. math:: A_b = W X_b^T, \qquad r = y - u \cdot \max(A_b, 0) - c, \qquad G_b = [A_b > 0] (r \circ X_b)

    of the sum over b. The forward product is three of the matrix unit's shorter ones (tf32x3). In the backward one [A > 0] is 0 or
    1, which the unit holds exactly, so two do, with the other factor cut in two. Both are within 1e-6.
    """
    wide = tl.broadcast_to(w[None, :, :], (WARPS, HP, DP))
    total = tl.zeros((WARPS, HP, DP), tl.float32)
    gone = tl.zeros((WARPS, TILE), tl.float32)
    squares = tl.zeros((WARPS, TILE), tl.float64)
    for start in range(0, n, WARPS * TILE):
        rows = start + tl.arange(0, WARPS)[:, None] * TILE + tl.arange(0, TILE)[None, :]
        inputs = tl.load(x + rows[:, :, None] * DP + tl.arange(0, DP)[None, None, :])
        targets = tl.load(y + rows)
        a = tl.dot(wide, tl.permute(inputs, (0, 2, 1)), input_precision="tf32x3")
        f = tl.sum(tl.maximum(a, 0.0) * u[None, :, None], 1) + c
        r = tl.where(rows < n, targets - f, 0.0)
        pulls = r[:, :, None] * inputs
        high = (pulls.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # what fits the unit's 10 bits
        on = tl.where(a > 0, 1.0, 0.0)
        total = tl.dot(on, high, total, input_precision="tf32")
        total = tl.dot(on, pulls - high, total, input_precision="tf32")
        gone += r
        squares += r.to(tl.float64) * r.to(tl.float64)
    return tl.sum(total, 0), tl.sum(tl.sum(gone, 1), 0), tl.sum(tl.sum(squares, 1), 0)


@jit
def load_first(
    q, D: tl.constexpr, H: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, W_AT: tl.constexpr, B_AT: tl.constexpr
):  # fmt: skip
    """The weights of the first layer, [HP, DP], with its bias in column D."""
    i = tl.arange(0, HP)[:, None]
    j = tl.arange(0, DP)[None, :]
    w = tl.load(q + W_AT + i * D + j, mask=(i < H) & (j < D), other=0.0)
    if B_AT >= 0:
        w += tl.load(q + B_AT + i + 0 * j, mask=(i < H) & (j == D), other=0.0)
    return w


@jit
def store_first_and_last(
    g, gw, gu, gc, weight,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr,
    W_AT: tl.constexpr, B_AT: tl.constexpr, U_AT: tl.constexpr, C_AT: tl.constexpr,
):  # fmt: skip
    """Writes `weight` times the gradients of the first and of the last layer to g."""
    i = tl.arange(0, HP)[:, None]
    j = tl.arange(0, DP)[None, :]
    k = tl.arange(0, KP)
    gw *= weight
    tl.store(g + W_AT + i * D + j, gw, mask=(i < H) & (j < D))
    if B_AT >= 0:
        tl.store(g + B_AT + i + 0 * j, gw, mask=(i < H) & (j == D))
    tl.store(g + U_AT + k, weight * gu, mask=k < K)
    if C_AT >= 0:
        tl.store(g + C_AT, weight * gc)


@jit
def through_second(h, slope, u, v, shift, c, targets, within, gu, gv, ga, ACTIVATION: tl.constexpr):
    """The second hidden layer of a tile: the gradient at the first, the residuals, and the sums with this tile in them."""
    last, steep = activate(tl.dot(v, h, input_precision="ieee") + shift[:, None], ACTIVATION)
    r = tl.where(within, targets - tl.sum(last * u[:, None], 0) - c, 0.0)
    gu += tl.sum(last * r[None, :], 1)
    back = steep * u[:, None] * r[None, :]
    gv = tl.dot(back, tl.trans(h), gv, input_precision="ieee")
    ga += tl.sum(back, 1)
    return slope * tl.dot(tl.trans(v), back, input_precision="ieee"), r, gu, gv, ga


@jit
def pull(
    x, y, n, q, g, noise, shape, rate,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr,
    W_AT: tl.constexpr, B_AT: tl.constexpr, V_AT: tl.constexpr, A_AT: tl.constexpr, U_AT: tl.constexpr, C_AT: tl.constexpr,
    S_AT: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    r"""Writes the gradient of the log likelihood, and of the log prior of a learned noise, at q to g.

    Returns the sum of squares and 1 / sigma^2. The network is :math:`f = u \cdot \phi(W x + b) + c`, or, where V_AT is not
    negative, :math:`f = u \cdot \phi(V \phi(W x + b) + a) + c` with K units in the second layer.
    """
    w = load_first(q, D, H, DP, HP, W_AT, B_AT)
    k = tl.arange(0, KP)  # units of the last hidden layer
    u = tl.load(q + U_AT + k, mask=k < K, other=0.0)
    c = 0.0
    if C_AT >= 0:
        c = tl.load(q + C_AT)
    if S_AT >= 0:
        noise = tl.exp(-2.0 * tl.load(q + S_AT).to(tl.float64))
    weight = noise.to(tl.float32)

    if WARPS > 0:
        gw, gc, squares = relu_by_warp(x, y, n, w, u, c, DP, HP, WARPS, TILE)
        gu = tl.sum(w * gw, 1)
        gw *= u[:, None]
    else:
        if V_AT >= 0:
            l = tl.arange(0, HP)[None, :]  # noqa: E741
            at_v = V_AT + k[:, None] * H + l
            has_v = (k[:, None] < K) & (l < H)
            v = tl.load(q + at_v, mask=has_v, other=0.0)
            gv = tl.zeros((KP, HP), tl.float32)
            shift = tl.zeros((KP,), tl.float32)
            if A_AT >= 0:
                shift = tl.load(q + A_AT + k, mask=k < K, other=0.0)
            ga = tl.zeros((KP,), tl.float32)
        gw = tl.zeros((HP, DP), tl.float32)
        gu = tl.zeros((KP,), tl.float32)
        gone = tl.zeros((TILE,), tl.float32)
        lost = tl.zeros((TILE,), tl.float64)
        for start in range(0, n, TILE):
            rows = start + tl.arange(0, TILE)
            inputs = tl.load(x + rows[:, None] * DP + tl.arange(0, DP)[None, :])
            targets = tl.load(y + rows)
            h, slope = activate(tl.dot(w, tl.trans(inputs), input_precision="ieee"), ACTIVATION)
            if V_AT >= 0:
                back, r, gu, gv, ga = through_second(h, slope, u, v, shift, c, targets, rows < n, gu, gv, ga, ACTIVATION)
            else:
                r = tl.where(rows < n, targets - tl.sum(h * u[:, None], 0) - c, 0.0)
                gu += tl.sum(h * r[None, :], 1)
                back = slope * u[:, None] * r[None, :]
            gw = tl.dot(back, inputs, gw, input_precision="ieee")
            gone += r
            lost += r.to(tl.float64) * r.to(tl.float64)
        gc = tl.sum(gone, 0)
        squares = tl.sum(lost, 0)
        if V_AT >= 0:
            tl.store(g + at_v, weight * gv, mask=has_v)
            if A_AT >= 0:
                tl.store(g + A_AT + k, weight * ga, mask=k < K)

    store_first_and_last(g, gw, gu, gc, weight, D, H, K, DP, HP, KP, W_AT, B_AT, U_AT, C_AT)
    if S_AT >= 0:
        tl.store(g + S_AT, (noise * squares - n + 2.0 * (rate * noise - shape)).to(tl.float32))
    return squares, noise


@jit
def energies(q, here, tight, squares, noise, shape, rate, log_likelihood, log_prior, constants, n, S_AT: tl.constexpr):
    """Writes the log likelihood and the log prior at q, which is `here`."""
    wide = here.to(tl.float64)
    prior = tl.load(constants + 4) - 0.5 * tl.sum(wide * wide * tight, 0)
    likelihood = tl.load(constants + 5) * n - 0.5 * noise * squares
    if S_AT >= 0:
        log_scale = tl.load(q + S_AT).to(tl.float64)
        prior -= 2.0 * shape * log_scale + rate * noise
        likelihood -= n * log_scale
    tl.store(log_prior, prior)
    tl.store(log_likelihood, likelihood)


# Without a promise of alignment all vectors of a chain get one arrangement over threads, and all calls one compiled kernel.
@jit(
    do_not_specialize=["n", "steps", "scale_stride"],
    do_not_specialize_on_alignment=["q", "v", "g", "log_likelihood", "log_prior", "step", "left", "scale", "precision"],
)
def trajectory(
    x, y, q, v, g, log_likelihood, log_prior, step, left, scale, precision, constants,
    n, steps, scale_stride,
    P: tl.constexpr, PP: tl.constexpr, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr,
    KP: tl.constexpr, W_AT: tl.constexpr, B_AT: tl.constexpr, V_AT: tl.constexpr, A_AT: tl.constexpr, U_AT: tl.constexpr,
    C_AT: tl.constexpr, S_AT: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, TILE: tl.constexpr,
    MOVE: tl.constexpr,
):  # fmt: skip
    """`min(left, steps)` leapfrog steps of a chain, or (MOVE = False) one gradient. Places *_AT are -1 for what there is not."""
    chain = tl.program_id(0).to(tl.int64)
    q += chain * P
    g += chain * P
    cold = tl.load(constants).to(tl.float32)  # 1 / T
    noise = tl.load(constants + 1)  # 1 / sigma^2 where it is known
    shape = tl.load(constants + 2)  # of the prior of a learned one
    rate = tl.load(constants + 3)

    at = tl.arange(0, PP)
    has = at < P
    tight = tl.load(precision + at, mask=has, other=0.0)
    here = tl.load(q + at, mask=has, other=0.0)
    slope = tl.zeros_like(here)
    moves = 0
    if MOVE:
        v += chain * P
        moves = tl.minimum(tl.load(left + chain), steps)
        e = tl.load(step + chain) * tl.load(scale + chain * scale_stride + at, mask=has, other=0.0)
        speed = tl.load(v + at, mask=has, other=0.0)
        slope = tl.load(g + at, mask=has, other=0.0)

    squares = tl.full((), 0.0, tl.float64)
    for t in range(tl.maximum(moves, 1)):
        move = t < moves  # a chain with no steps left still learns its energy
        if MOVE:
            speed = tl.where(move, speed + 0.5 * e * slope, speed)
            here = tl.where(move, here + e * speed, here)
            tl.store(q + at, here, mask=has)
            tl.debug_barrier()  # other threads read what this one wrote
        squares, noise = pull(
            x, y, n, q, g, noise, shape, rate, D, H, K, DP, HP, KP, W_AT, B_AT, V_AT, A_AT, U_AT, C_AT, S_AT,
            ACTIVATION, WARPS, TILE,
        )  # fmt: skip
        tl.debug_barrier()
        new = cold * (tl.load(g + at, mask=has, other=0.0) - tight * here)
        if MOVE:
            slope = tl.where(move, new, slope)
            speed = tl.where(move, speed + 0.5 * e * slope, speed)
        else:
            slope = new
    tl.store(g + at, slope, mask=has)
    if MOVE:
        tl.store(v + at, speed, mask=has)

    energies(q, here, tight, squares, noise, shape, rate, log_likelihood + chain, log_prior + chain, constants, n, S_AT)


@jit
def turn(v, force, reach, P: tl.constexpr):
    """`integrators.turn` of one chain: the new direction, and the rise of the kinetic energy. A reach of 0 changes nothing."""
    root = tl.sqrt(tl.full((), P, tl.float64))
    wide = force.to(tl.float64)
    strength = tl.maximum(tl.sqrt(tl.sum(wide * wide, 0)), 1e-30)
    cosine = tl.sum(wide * v.to(tl.float64), 0) / (strength * root)
    delta = reach * strength * root / (P - 1)
    fade = tl.exp(-delta)
    along = (1 - fade) * (1 + fade + cosine * (1 - fade))
    stay = 2 * fade
    length = tl.sqrt(tl.maximum(along * along + stay * stay + 2 * along * stay * cosine, 1e-60))
    new = (stay / length).to(tl.float32) * v + (along * root / (length * strength)).to(tl.float32) * force
    gain = delta - 0.6931471805599453 + tl.log(tl.maximum(1 + cosine + (1 - cosine) * fade * fade, 1e-16))
    return new, (P - 1) * gain


@jit(
    do_not_specialize=["n", "steps", "scale_stride", "chains"],
    do_not_specialize_on_alignment=[
        "q", "v", "g", "log_likelihood", "log_prior", "gain", "step", "left", "scale", "precision", "kicks", "fresh",
    ],
)  # fmt: skip
def microcanonical(
    x, y, q, v, g, log_likelihood, log_prior, gain, step, left, scale, kicks, fresh, precision, constants,
    n, steps, scale_stride, chains, share,
    P: tl.constexpr, PP: tl.constexpr, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr,
    KP: tl.constexpr, W_AT: tl.constexpr, B_AT: tl.constexpr, V_AT: tl.constexpr, A_AT: tl.constexpr, U_AT: tl.constexpr,
    C_AT: tl.constexpr, S_AT: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, TILE: tl.constexpr,
    KICK: tl.constexpr,
):  # fmt: skip
    """`min(left, steps)` microcanonical steps of a chain, each with noise added to its direction where KICK says so.

    A step is turn, drift, turn, drift, turn. It runs as two halves of one kind, so that the gradient is compiled once: the last turn
    of a half is by nothing in the first of them.
    """
    chain = tl.program_id(0).to(tl.int64)
    q += chain * P
    v += chain * P
    g += chain * P
    kicks += chain * P
    cold = tl.load(constants).to(tl.float32)
    noise = tl.load(constants + 1)
    shape = tl.load(constants + 2)
    rate = tl.load(constants + 3)

    at = tl.arange(0, PP)
    has = at < P
    tight = tl.load(precision + at, mask=has, other=0.0)
    here = tl.load(q + at, mask=has, other=0.0)
    speed = tl.load(v + at, mask=has, other=0.0)
    slope = tl.load(g + at, mask=has, other=0.0)
    unit = tl.load(scale + chain * scale_stride + at, mask=has, other=0.0)
    moves = tl.minimum(tl.load(left + chain), steps)
    length = tl.load(step + chain)
    long = length.to(tl.float64)
    by = 0.5 * length * unit
    if KICK:
        strong = tl.load(fresh + chain)
        root = tl.sqrt(tl.full((), P, tl.float64))

    risen = tl.full((), 0.0, tl.float64)
    squares = tl.full((), 0.0, tl.float64)
    for t in range(tl.maximum(2 * moves, 1)):
        move = moves > 0  # a chain with no steps left still learns its energy
        second = t % 2 == 1
        reach = tl.where(move, tl.where(second, 1 - 2 * share, share), 0.0) * long
        speed, more = turn(speed, unit * slope, reach, P)
        risen += more
        here = tl.where(move, here + by * speed, here)
        tl.store(q + at, here, mask=has)
        tl.debug_barrier()  # other threads read what this one wrote
        squares, noise = pull(
            x, y, n, q, g, noise, shape, rate, D, H, K, DP, HP, KP, W_AT, B_AT, V_AT, A_AT, U_AT, C_AT, S_AT,
            ACTIVATION, WARPS, TILE,
        )  # fmt: skip
        tl.debug_barrier()
        slope = cold * (tl.load(g + at, mask=has, other=0.0) - tight * here)
        speed, more = turn(speed, unit * slope, tl.where(second, share, 0.0) * long, P)
        risen += more
        if KICK:
            drawn = tl.load(kicks + (t // 2) * chains * P + at, mask=has & second, other=0.0)
            speed += strong * drawn
            wide = speed.to(tl.float64)
            speed *= (root / tl.sqrt(tl.sum(wide * wide, 0))).to(tl.float32)
    tl.store(g + at, slope, mask=has)
    tl.store(v + at, speed, mask=has)
    tl.store(gain + chain, risen)

    energies(q, here, tight, squares, noise, shape, rate, log_likelihood + chain, log_prior + chain, constants, n, S_AT)
