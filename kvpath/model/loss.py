"""Cross-entropy of a linear head in chunks of tokens: the logits of a whole batch never exist at once.

Products run in the dtype of the pass (autocast's, if it is on), log-softmax in float32 or wider, sums in float64.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE = -100
"""The label of a position that is not scored."""


class LossSums(NamedTuple):
    """Sums over the scored positions, to be divided by the number of them in the whole optimizer step."""

    total: Tensor
    """float64: what is trained on, negative log-likelihoods in nats plus the z-loss; carries gradients."""

    nll: Tensor
    """float64: the negative log-likelihoods alone, in nats; no gradient."""

    count: Tensor  # type: ignore[assignment]
    """int64: how many positions were scored."""

    nll_BT: Tensor
    """float32 or wider: the negative log-likelihood of each label, 0 where nothing is scored; no gradient."""


def linear_cross_entropy(
    x_BTC: Tensor, weight_VC: Tensor, labels_BT: Tensor, z_loss: float = 0.0, chunk_elements: int = 2**25
) -> LossSums:
    """Sum of -log softmax(W x)[label] + z_loss * logsumexp(W x)^2 over positions whose label is not IGNORE.

    Args:
        x_BTC: the normed output of the last layer.
        weight_VC: the output head.
        labels_BT: int64, IGNORE where nothing is to be predicted.
        z_loss: weight of the squared log-partition function, which keeps logits from drifting; 0 for none.
        chunk_elements: logits held at once.
    """
    x_NC, labels_N = x_BTC.reshape(-1, x_BTC.shape[-1]), labels_BT.reshape(-1)
    device = x_BTC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_BTC.dtype
    most = max(1, chunk_elements // weight_VC.shape[0])
    # Chunks of equal size: a short last one would read the whole table for a few tokens.
    chunk = max(1, math.ceil(len(x_NC) / max(1, math.ceil(len(x_NC) / most))))
    grads = [torch.is_grad_enabled() and part.requires_grad for part in (x_NC, weight_VC)]
    total, nll, nll_N = _ChunkedLoss.apply(x_NC, weight_VC, labels_N, z_loss, chunk, dtype, *grads)
    return LossSums(total, nll.detach(), (labels_N != IGNORE).sum(), nll_N.view_as(labels_BT))


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are made in the forward pass, while a chunk's logits are there, and only scaled in the backward."""

    @staticmethod
    def forward(ctx, x_NC, weight_VC, labels_N, z_loss, chunk, dtype, need_x, need_weight):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast(x_NC.device.type, enabled=False), torch.no_grad():
            weight = weight_VC.to(dtype)
            sums = torch.zeros(2, dtype=torch.float64, device=x_NC.device)
            nll_N = torch.zeros(len(x_NC), dtype=wide, device=x_NC.device)
            grad_x = torch.empty_like(x_NC) if need_x else None
            grad_weight = None
            for start in range(0, len(x_NC), chunk):
                part = slice(start, start + chunk)
                x, labels = x_NC[part].to(dtype), labels_N[part]
                logits = x @ weight.T
                scored = labels != IGNORE
                target = labels.masked_fill(~scored, 0)[:, None]
                wanted = logits.gather(1, target)[:, 0].to(wide)
                # Every pass over the logits costs, and so does a second copy: exponentials take their place, and narrow
                # logits are widened by the first pass that writes.
                top = logits.amax(-1, keepdim=True).to(wide)
                exps = (logits.sub_(top) if dtype == wide else logits - top).exp_()
                del logits
                partition = exps.sum(-1)
                lse = top[:, 0] + partition.log()
                nll_N[part] = (lse - wanted) * scored
                nll = nll_N[part].sum(dtype=torch.float64)
                penalty = (lse.square() * scored).sum(dtype=torch.float64) if z_loss else 0.0
                sums += torch.stack((nll + z_loss * penalty, nll))
                if not (need_x or need_weight):
                    continue
                # d nll / d logits = softmax - onehot;  d lse^2 / d logits = 2 lse softmax
                grad = exps.mul_((scored * (1 + 2 * z_loss * lse) / partition)[:, None])
                grad = grad.scatter_add_(1, target, -scored.to(wide)[:, None]).to(dtype)
                if grad_x is not None:
                    grad_x[part] = (grad @ weight).to(grad_x.dtype)
                if need_weight and grad_weight is None:
                    grad_weight = (grad.T @ x).to(wide)
                elif grad_weight is not None and dtype == wide:
                    grad_weight.addmm_(grad.T, x)
                elif grad_weight is not None:
                    grad_weight += grad.T @ x
        if need_weight and grad_weight is None:  # no token at all
            grad_weight = torch.zeros_like(weight_VC)
        ctx.save_for_backward(grad_x, None if grad_weight is None else grad_weight.to(weight_VC.dtype))
        ctx.mark_non_differentiable(nll_N)
        return sums[0], sums[1], nll_N

    @staticmethod
    def backward(ctx, scale, *_):  # type: ignore[no-untyped-def]
        # In place, since the table's gradient is large; autograd refuses a second pass over what was changed.
        scaled = [None if grad is None else grad.mul_(scale.to(grad.dtype)) for grad in ctx.saved_tensors]
        return *scaled, *[None] * 6
