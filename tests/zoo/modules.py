"""torch's own modules: recurrent nets, transformers, convolutions with BatchNorm, attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import zerocli
from zoo.blocks import WIDTH, WORDS, Stack
from zoo.case import case, trained


class Recurrent(nn.Module):
    """An embedding, recurrent layers, a head."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **options):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, batch_first=True, **options) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH) if options.get("bidirectional") else nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            layer.flatten_parameters()
            x = self.norm(x + self.mix(layer(x)[0]))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


trained("lstm", Recurrent, gpu=True)
trained("lstm-without-units", Recurrent, settings={"units": nn.LayerNorm})
trained("gru-bidirectional", lambda: Recurrent(nn.GRU, bidirectional=True, num_layers=2))
trained("rnn-with-dropout", lambda: Recurrent(nn.RNN, num_layers=2, dropout=0.2))
trained("lstm-with-projection", lambda: Recurrent(nn.LSTM, bias=False))


class Encoder(nn.Module):
    """nn.TransformerEncoder with dropout and a mask; in evaluation its fast path reads weights at once."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.encoder(self.embed(tokens), mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


trained("transformer-encoder", Encoder, also=("stage3-cpu",), gpu=True)


@case("transformer-encoder-fast-path")
def fast_path(run):
    """Evaluation between steps takes the fused path."""
    trainer = run.shard(Encoder)
    for step in range(3):
        trainer.model.train()
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
        trainer.model.eval()
        with torch.no_grad():
            run.log("evaluation", trainer(run.tokens(step + 20, 4, 8)))


class EncoderDecoder(nn.Module):
    """nn.Transformer: the encoder's output goes into every layer of the decoder."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        source, target = self.embed(tokens), self.embed(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=tokens.device)
        out = self.head(self.transformer(source, target, tgt_mask=mask))
        return F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())


trained("encoder-decoder", EncoderDecoder)


class Attention(nn.Module):
    """nn.MultiheadAttention reads its projection's weights instead of calling it."""

    def __init__(self):
        super().__init__()
        self.attend, self.norm = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.attend(x, x, x)[0])


def _attention() -> Stack:
    model = Stack()
    model.blocks = nn.ModuleList(Attention() for _ in range(3))
    return model


trained("multihead-attention", _attention)
trained(
    "multihead-attention-projection-a-unit",
    _attention,
    settings={"units": nn.MultiheadAttention},
)


class Convolutional(nn.Module):
    """A conv stem, residual blocks with BatchNorm, a pooled head."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

        def forward(self, x):
            return F.relu(x + self.norm(self.conv(x)), inplace=True)

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(*(Convolutional.Layer() for _ in range(3)))
        self.head = nn.Linear(4, 5)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.layers(self.stem(x)).mean((2, 3))), y)


def _images(run, step):
    return run.randn(step, 4, 3, 9, 9), run.tokens(step, 4, high=5)


trained("convolutional-batchnorm", Convolutional, _images, also=("stage3-cpu",), gpu=True)


@case("batchnorm-train-and-eval")
def train_and_eval(run):
    """Running statistics are each rank's own, and evaluation uses them."""
    trainer = run.shard(Convolutional)
    for step in range(3):
        trainer.model.train()
        trainer.backward(trainer(*_images(run, step)))
        trainer.step()
        trainer.model.eval()
        with torch.no_grad():
            run.log("evaluation", trainer(*_images(run, step + 20)))


class Vision(nn.Module):
    """A vision transformer: patches by a convolution, a class token, learned positions."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 3, stride=3)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 10, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x, y):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, 0]), y)


trained("vision-transformer", Vision, _images)


class Bag(nn.Module):
    """Embedding bags and an adaptive softmax, as recommenders and large vocabularies have them."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(WORDS, WIDTH) for _ in range(2))
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, WORDS, [3, 7], div_value=2.0)

    def forward(self, tokens):
        return self.loss(self.bags[0](tokens) + self.bags[1](tokens.flip(0)), tokens[:, 0]).loss


trained("embedding-bags", Bag, lambda run, step: (run.tokens(step, 12, 4),))


class Sampled(nn.Module):
    """A variational autoencoder: noise in forward, two losses."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2 * WIDTH))
        self.decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, -1)
        out = self.decoder(mean + torch.randn_like(mean) * (0.5 * log_var).exp())
        return F.mse_loss(out, x) + 0.1 * (mean.pow(2) + log_var.exp() - log_var).mean()


trained("variational-autoencoder", Sampled, lambda run, step: (run.randn(step, 4, WIDTH),))


def _adapted(make=Stack, **settings):
    """Return a function that builds a model with adapters, of which both matrices count from the first step."""

    def build():
        model = zerocli.lora(make(), **{"rank": 2} | settings)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".b"):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        return model

    return build


trained("lora", _adapted(), also=("stage0", "stage1", "stage3-cpu"), gpu=True)
trained("lora-dora-and-dropout", _adapted(dora=True, dropout=0.2), also=("stage3-cpu",))
trained("lora-of-an-encoder", _adapted(Encoder, targets=["linear1", "linear2"]), also=("stage0",))
trained("lora-and-a-whole-embedding", _adapted(targets="up", save_modules=["embed"]), also=("stage2-cpu", "stage3-cpu"))
trained("lora-recomputed", _adapted(dropout=0.2), settings={"recompute": True}, also=("stage3-cpu",))
trained("lora-under-units-without-children", _adapted(), settings={"units": lambda module: not list(module.children())})
