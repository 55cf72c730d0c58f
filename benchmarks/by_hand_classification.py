"""A classifier of very many classes in plain torch, by hand: data-parallel, and with the classifier split.

Both are given the rows of this rank of each batch, and make the step that one process would make on the whole batch:
the loss is the mean over all ranks' images.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 0.1

# Their names changed in torch 2.13.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Step = Callable[[Tensor, Tensor], Tensor]
"""Trains on images [rows, 3, height, width] and classes [rows], and returns the mean loss of all ranks' rows."""


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, fused=True)


class DataParallelByHand:
    """Each rank holds the whole model, and the gradients of all of it are averaged while backward runs.

    Args:
        features: The backbone.
        head: The classifier.
    """

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        self.model = nn.Sequential(features, head)
        self._replica = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._optimizer = sgd(self.model)

    def step(self, images: Tensor, classes: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self._replica(images), classes)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach()

    def step_alone(self, images: Tensor, classes: Tensor) -> Tensor:
        """The same work of this rank, and nothing is exchanged: what is left when the network costs nothing."""
        with self._replica.no_sync():
            return self.step(images, classes)


class HybridByHand:
    """Each rank holds the backbone and the weights of some of the classes.

    The features and classes of the batch are gathered; each rank computes the logits of its classes for all images. Of
    the softmax, three numbers an image are exchanged, all at once. The features' gradients are summed where the
    features came from, and the backbone's are averaged while its backward runs.

    Args:
        features: The backbone.
        head: The whole classifier, of which this rank keeps its part.
    """

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if head.out_features % ranks:
            raise ValueError(f"{head.out_features} classes cannot be split evenly over {ranks} ranks.")
        share = head.out_features // ranks
        self.first = rank * share
        self.features = features
        self.head = nn.Linear(head.in_features, share)
        with torch.no_grad():
            self.head.weight.copy_(head.weight[self.first : self.first + share])
            self.head.bias.copy_(head.bias[self.first : self.first + share])
        self._replica = DistributedDataParallel(features, gradient_as_bucket_view=True)
        self._optimizer = sgd(self.features, self.head)

    def step(self, images: Tensor, classes: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        own = self._replica(images)
        every, targets = _gather(own.detach()), _gather(classes)
        every.requires_grad_()
        loss, logits, gradient = self._softmax(every, targets)
        logits.backward(gradient)
        # The replica averages over ranks what stands for a mean over all ranks' rows.
        own.backward(_reduce_scatter(every.grad) * dist.get_world_size())
        self._optimizer.step()
        return loss

    def _softmax(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of the whole batch, this rank's logits [batch, classes / ranks], and their gradient."""
        logits = self.head(features)
        with torch.no_grad():
            rows, places = torch.arange(len(targets)), targets - self.first
            mine = (places >= 0) & (places < logits.shape[1])
            rows, places = rows[mine], places[mine]
            largest = logits.amax(1)
            powers = (logits - largest[:, None]).exp_()
            wanted = torch.zeros_like(largest).index_put_((rows,), logits[rows, places])
            parts = _gather(torch.stack([largest, powers.sum(1), wanted])[None])  # [ranks, 3, batch]
            top = parts[:, 0].amax(0)
            total = ((parts[:, 0] - top).exp() * parts[:, 1]).sum(0)
            loss = (top + total.log() - parts[:, 2].sum(0)).mean()
            gradient = powers.mul_(((largest - top).exp() / total / len(targets))[:, None])
            gradient[rows, places] -= 1 / len(targets)
        return loss, logits, gradient


def _gather(own: Tensor) -> Tensor:
    """The tensors of all ranks, one behind the other."""
    every = own.new_empty(dist.get_world_size() * own.shape[0], *own.shape[1:])
    _ALL_GATHER(every, own.contiguous())
    return every


def _reduce_scatter(every: Tensor) -> Tensor:
    """This rank's rows of the sum over ranks."""
    own = every.new_empty(every.shape[0] // dist.get_world_size(), *every.shape[1:])
    _REDUCE_SCATTER(own, every.contiguous())
    return own
