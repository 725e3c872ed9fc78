"""XDomainMix (Liu et al., IJCAI 2024) as pure functions of tensors; README.md maps equation → symbol → function.

Every function also runs under `torch.func.vmap` over stacked heads, and those that take z also on maps [B,K,h,w].
"""

from xdm_ft.xdomainmix.masks import autograd_scores, domain_quantile, linear_scores, specific_mask
from xdm_ft.xdomainmix.mixing import Partners, decompose, draw_partners, mix

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
