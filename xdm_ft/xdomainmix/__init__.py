"""XDomainMix (Liu et al., IJCAI 2024) as pure functions of tensors; README.md maps equation → symbol → function.

Every function also runs under `torch.func.vmap` over stacked heads, and those that take z also on maps [B,K,h,w].
"""

from xdm_ft.xdomainmix.masks import domain_quantile, specific_mask
from xdm_ft.xdomainmix.mixing import Partners, decompose, draw_partners, mix
from xdm_ft.xdomainmix.scores import autograd_scores, linear_scores

__all__ = [
    "Partners",
    "autograd_scores",
    "decompose",
    "domain_quantile",
    "draw_partners",
    "linear_scores",
    "mix",
    "specific_mask",
]
