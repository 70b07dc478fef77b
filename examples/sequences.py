"""Readers of sentences: an LSTM or a GRU, and a small transformer encoder, as one would write them without dubito.

Sentences are rows of word ids that end in zeros, as `dubito.data.polarity` gives them. How many zeros does not matter: the recurrent
networks answer from the state after the last word, and the encoder neither attends to padding nor averages over it.

    import dubito
    from sequences import Recurrent

    data = dubito.data.polarity()
    model = dubito.Model(Recurrent(len(data.vocabulary)), dubito.Categorical(), dubito.priors.Normal(scale=0.8))
    variational = dubito.MCDropout(at="", rate=0.25, epochs=20)  # words, inputs, states and features, a mask a sentence
    posterior = dubito.fit(model, variational, (data.x_train, data.y_train), validation=(data.x_valid, data.y_valid))
    print(dubito.judge(posterior, (data.x_test, data.y_test)).values)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

PADDING = 0


class Recurrent(nn.Module):
    """Logits [B, classes] of sentences [B, T]: a table of words, an `nn.LSTM` or `nn.GRU`, and a linear layer on its last state.

    `naive` is the rate of ordinary dropout on what enters and leaves the recurrent layer, with new masks at every word.

    >>> Recurrent(50)(torch.tensor([[4, 7, 0], [4, 7, 9]])).shape
    torch.Size([2, 2])
    """

    def __init__(
        self,
        words: int,
        *,
        kind: Literal["lstm", "gru"] = "lstm",
        width: int = 128,
        hidden: int = 128,
        classes: int = 2,
        naive: float = 0.0,
    ):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PADDING)
        self.rnn = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)
        self.naive = nn.Dropout(naive) if naive else nn.Identity()
        nn.init.normal_(self.words.weight, std=0.1)  # of the size of the other weights: torch's own tables have 1
        with torch.no_grad():
            self.words.weight[PADDING] = 0.0

    def forward(self, ids: Tensor) -> Tensor:
        states = self.naive(self.rnn(self.naive(self.words(ids)))[0])  # [B, T, H]
        last = ids.ne(PADDING).sum(1).clamp_min(1) - 1  # [B]
        return self.head(states.gather(1, last.view(-1, 1, 1).expand(-1, 1, states.shape[2])).squeeze(1))


class Encoder(nn.Module):
    """Logits [B, classes] of sentences [B, T]: a transformer encoder, and a linear layer on the mean over the words.

    >>> Encoder(50)(torch.tensor([[4, 7, 0], [4, 7, 9]])).shape
    torch.Size([2, 2])
    """

    def __init__(
        self,
        words: int,
        *,
        width: int = 64,
        heads: int = 4,
        hidden: int = 128,
        layers: int = 2,
        longest: int = 200,
        dropout: float = 0.1,
        classes: int = 2,
    ):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PADDING)
        self.places = nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids.eq(PADDING)  # [B, T]
        places = self.places(torch.arange(ids.shape[1], device=ids.device))  # [T, W]
        h = self.layers(self.words(ids) + places, src_key_padding_mask=padding)  # [B, T, W]
        count = (~padding).sum(1, keepdim=True).clamp_min(1)
        return self.head(h.masked_fill(padding.unsqueeze(-1), 0.0).sum(1) / count)
