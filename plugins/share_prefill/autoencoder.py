"""The convolutional autoencoder that compresses block maps (Appendix C, Table 3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseprefill.call import uncast
from sparseprefill.profiles.table import Steps

GRAIN = 16
"""Two poolings of 4: the side of a map must be a multiple of it."""


class Autoencoder(nn.Module):
    """Table 3 for maps of `size x size`; the paper's are 1936 wide, so that its linear layers have 468,512 inputs."""

    def __init__(self, size: int, latent: int = 64) -> None:
        super().__init__()
        side = size // GRAIN
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * side * side, latent),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, 32 * side * side),
            nn.ReLU(),
            nn.Unflatten(1, (32, side, side)),
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, stride=4),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[n, 1, size, size]`` in 0 to 1, restored from their codes."""
        restored: Tensor = self.decoder(self.encoder(x))
        return restored


def scaled(maps: Tensor, most: int = 256) -> Tensor:
    """``[n, 1, s, s]`` in 0 to 1 from block maps ``[n, R, R]``.

    Resized to the next multiple of 16, at most `most`; each row over its largest entry, and the square root of that:
    else the error counts the first rows and the diagonal alone, and small numbers are lost in it.
    """
    size = min(most, -(-maps.shape[-1] // GRAIN) * GRAIN)
    resized = functional.adaptive_avg_pool2d(maps[:, None], size)
    peak = resized.amax(-1, keepdim=True)
    return (resized / torch.where(peak == 0, 1.0, peak)).sqrt()


class Training:
    """Steps of Adam on maps ``[n, 1, size, size]``, with a learning rate of 1e-3 (A.4).

    On a GPU a step is so small that the host's launches are all that takes time, so that after `record` each is one
    launch of a graph.
    """

    def __init__(self, model: Autoencoder, x: Tensor, batch: int) -> None:
        self.model, self.x, self.batch = model, x, batch
        self._records = x.device.type == "cuda" and len(x) >= batch
        self._optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=self._records)
        self._at = torch.zeros(batch, dtype=torch.int64, device=x.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss = torch.zeros((), dtype=x.dtype, device=x.device)

    def step(self, part: Tensor) -> Tensor:
        """Mean squared error of the maps of these indices, before the step; the next step may write over it."""
        if self._graph is None or len(part) != self.batch:
            return self._eager(part)
        self._at.copy_(part)
        self._graph.replay()
        return self._loss

    def record(self) -> None:
        """Make a graph of a step, once, when some have run on the current stream, which is not the default one."""
        if self._records and self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(self.x.device)):
                self._loss = self._eager(self._at)
            self._graph = graph

    def _eager(self, part: Tensor) -> Tensor:
        wanted = self.x[part]
        loss = functional.mse_loss(self.model(wanted), wanted)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """On a GPU, work goes to a stream of its own, behind what is queued; its end is waited for."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@uncast
def compress(
    maps: Tensor,
    *,
    latent: int = 64,
    epochs: int = 1000,
    patience: int = 50,
    batch: int = 16,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Steps = lambda done, of: None,
) -> tuple[Tensor, float]:
    """Codes ``[n, latent]`` of block maps ``[n, R, R]``, and the mean squared error of the restored maps.

    Training ends early where the error has not fallen by a thousandth for `patience` epochs. The same seed gives the
    same codes on one kind of device.
    """
    x = scaled(maps)
    with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad(), aside(torch.device(device)):
        torch.manual_seed(seed)
        x = x.clone().to(device)
        model = Autoencoder(x.shape[-1], latent).to(device)
        training = Training(model, x, batch)
        best, since = float("inf"), 0
        for epoch in range(epochs):
            error = torch.zeros((), dtype=torch.float64, device=x.device)  # read once an epoch
            for part in torch.randperm(len(x), device="cpu").to(x.device).split(batch):
                error += training.step(part).double() * len(part)
            total = float(error)
            training.record()
            progress(epoch + 1, epochs)
            best, since = (total, 0) if total < best * 0.999 else (best, since + 1)
            if since >= patience:
                break
    with torch.no_grad():
        codes = torch.cat([model.encoder(part).cpu() for part in x.split(batch)])
        left = sum(float(functional.mse_loss(model(part), part)) * len(part) for part in x.split(batch))
    return codes, left / len(x)
