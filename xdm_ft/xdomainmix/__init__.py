"""XDomainMix (Liu et al., IJCAI 2024) as pure functions of tensors; README.md maps equation → symbol → function.

Every function also runs under `torch.func.vmap` over stacked heads, and those that take z also on maps [B,K,h,w].
"""

from xdm_ft.xdomainmix.decomposition import decompose, specific_mask
from xdm_ft.xdomainmix.importance import autograd_scores, linear_scores
from xdm_ft.xdomainmix.mixing import mix
from xdm_ft.xdomainmix.partners import Partners, draw_partners
from xdm_ft.xdomainmix.threshold import domain_quantile

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
