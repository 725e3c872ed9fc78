"""The blocks of an encoder: their names per family, and a probe pass that finds the chain that they are. How the tokens
of a vision transformer become one feature: `encoder.pooling`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from xdm_ft.runtime.errors import undocumented

Pooling = Literal["cls", "mean", "cls_mean", "projected"]
PoolingChoice = Annotated[
    Pooling | None,
    Field(
        description="feature of a vision transformer. null: the model's own; after the final norm: cls (class token), "
        "mean (mean of the patch tokens), cls_mean (both); projected: CLIP's, which zero_shot needs"
    ),
]


def pool(tokens: Tensor, prefix: int, pooling: Pooling) -> Tensor:
    """Tokens [B,N,K], of which the first is the class token and the first `prefix` are no patches → [B,K] or [B,2K]."""
    parts = {"cls": lambda: tokens[:, 0], "mean": lambda: tokens[:, prefix:].mean(1)}
    return torch.cat([part() for name, part in parts.items() if name in pooling.split("_")], dim=-1)


def outside_text_space(pooling: Pooling | None) -> str:
    """Returns why such features cannot be compared with class embeddings; "" if they can."""
    if pooling in (None, "projected"):
        return ""
    return (
        f"encoder.pooling: {pooling} gives features that do not match the text embeddings; leave it out, or use "
        "projected"
    )


def timm_reason(model: Any, pooling: Pooling | None) -> str:
    """Returns why this model of timm has no such pooling; "" if it has."""
    if pooling is None:
        return ""
    if pooling == "projected":
        return "has no projection; leave it out, or use cls, mean or cls_mean"
    if not hasattr(model, "num_prefix_tokens"):
        return "is not a vision transformer and averages over space; leave it out"
    return no_class_token(getattr(model, "cls_token", None) is not None, pooling)


def no_class_token(has_class_token: bool, pooling: Pooling) -> str:
    return "" if has_class_token or pooling == "mean" else "has no class token; leave it out, or use mean"


def timm_pooled(model: Any, maps: Tensor, pooling: Pooling) -> Tensor:
    """`model.forward_features` [B,N,K] → [B,K] or [B,2K]. `fc_norm` is the final norm of models built to average."""
    norm = getattr(model, "fc_norm", None) or nn.Identity()
    parts = (pool(maps, model.num_prefix_tokens, part) for part in pooling.split("_"))  # type: ignore[arg-type]
    return torch.cat([norm(part) for part in parts], dim=-1)


def clip_reason(visual: Any, pooling: Pooling | None) -> str:
    """Returns why the image side of this open_clip model has no such pooling; "" if it has."""
    if pooling in (None, "projected"):
        return ""
    if hasattr(visual, "trunk"):
        return timm_reason(visual.trunk, pooling)
    if not hasattr(visual, "class_embedding") or visual.attn_pool is not None:
        return "pools by attention; leave it out"
    return ""


def clip_pooled(visual: Any, images: Tensor, pooling: Pooling) -> Tensor:
    """Images [B,3,H,W] → [B,K] or [B,2K], before the projection to the space of the texts. Not for `projected`."""
    if hasattr(visual, "trunk"):
        return timm_pooled(visual.trunk, visual.trunk.forward_features(images), pooling)
    tokens = visual.transformer(visual._embeds(images))  # [B,1+N,K], as the first lines of open_clip's own forward
    return pool(visual.ln_post(tokens), 1, pooling)


FIRST_STAGE = 4  # stages begin at 1/4 of the resolution; what timm lists before (a ResNet's first ReLU) is stem
StageNames = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Names of an encoder's modules, in the order in which they run: stem, stages, transitions; see `Encoder`."""


def timm_stage_names(model: nn.Module, root: str) -> StageNames:
    """Stages are those of timm's feature extraction; none for a model that does not support it.

    The stem is the first convolution and the first max-pool before the first stage. `root` is the model's name in the
    encoder.
    """
    from timm.models.densenet import DenseTransition

    modules = dict(model.named_modules())
    names = list(modules)
    listed = [info for info in getattr(model, "feature_info", None) or () if info["module"] in modules]
    stages = [info["module"] for info in listed if info["reduction"] >= FIRST_STAGE]
    before = names[: names.index(stages[0])] if stages else names
    stem = []
    for kind in (nn.Conv2d, nn.MaxPool2d):
        stem += [name for name in before if isinstance(modules[name], kind)][:1]
    transitions = [name for name, module in modules.items() if isinstance(module, DenseTransition)]
    return with_root(root, stem), with_root(root, stages), with_root(root, transitions)


def clip_stage_names(visual: Any, root: str) -> StageNames:
    """The blocks of a ViT; first convolution, pooling and layers of a ResNet; or the names of timm's image trunk."""
    modules = dict(visual.named_modules())
    if "trunk" in modules:
        return timm_stage_names(visual.trunk, f"{root}.trunk")
    if "transformer.resblocks" in modules:
        blocks = [f"transformer.resblocks.{name}" for name, _ in modules["transformer.resblocks"].named_children()]
        return (), with_root(root, blocks), ()
    # the stem of a CLIP ResNet, three convolutions, ends in `avgpool`
    return with_root(root, ["conv1", "avgpool"]), with_root(root, [f"layer{number}" for number in range(1, 5)]), ()


def with_root(root: str, names: Iterable[str]) -> tuple[str, ...]:
    """Returns names of modules in a model as names in the encoder, in which the model is `root`."""
    return tuple(f"{root}.{name}" for name in names)


def timm_blocks(model: Any, root: str) -> list[tuple[str, ...]]:
    """Candidates for a model of timm: its own layers for layer-wise decay, coarser ones, its stages.

    A MobileNetV3's final convolution, which timm counts as a layer, is none.
    """
    with undocumented("timm"):
        from timm.models._efficientnet_blocks import ConvBnAct

    modules = dict(model.named_modules())
    candidates = []
    for coarse in (False, True):
        matcher = model.group_matcher(coarse=coarse) if hasattr(model, "group_matcher") else None
        if isinstance(matcher, Mapping):
            candidates.append(_matched_blocks(model, matcher))
    candidates.append([info["module"] for info in getattr(model, "feature_info", None) or ()])
    blocks_of = []
    for names in candidates:
        # a block is a composed module or a convolution (VGG); not a norm or an activation by itself
        parts = {name: modules[name] for name in names if name in modules}
        blocks = [name for name, part in parts.items() if isinstance(part, nn.Conv2d) or any(part.children())]
        if blocks and isinstance(modules[blocks[-1]], ConvBnAct):
            del blocks[-1]
        blocks_of.append(with_root(root, blocks))
    return blocks_of


def _matched_blocks(model: nn.Module, matcher: Mapping[str, Any]) -> list[str]:
    """The names that timm's patterns for layer-wise decay find in names of parameters."""
    patterns = []
    for entry in matcher.values():
        for pattern, suffix in [(entry, None)] if isinstance(entry, str) else entry or ():
            compiled = re.compile(pattern)
            # a pattern with a suffix is that of modules between blocks, which timm counts to the next or last block
            patterns.append((compiled, suffix is None and compiled.groups > 0))
    names: dict[str, None] = {}
    for parameter, _ in model.named_parameters():
        matches = ((pattern.match(parameter), is_block) for pattern, is_block in patterns)
        match, is_block = next(((match, is_block) for match, is_block in matches if match), (None, False))
        if match is not None and is_block:
            names[match.group()] = None
    return list(names)


def clip_blocks(visual: Any, root: str) -> list[tuple[str, ...]]:
    """Candidates for the image side of a CLIP: layers of its transformer or ResNet, or timm's image trunk."""
    if hasattr(visual, "trunk"):
        return timm_blocks(visual.trunk, f"{root}.trunk")
    layers = r"transformer\.resblocks\.\d+|layer\d+\.\d+"
    return [with_root(root, [name for name, _ in visual.named_modules() if re.fullmatch(layers, name)])]


PROBE_ERRORS = (RuntimeError, AssertionError, ValueError, TypeError, IndexError, AttributeError, KeyError)


@dataclass(frozen=True)
class ChainBlock:
    """A module that maps one activation tensor to the next."""

    name: str  # in the encoder
    shape: tuple[int, ...]  # of the activation that it gets, without the batch axis
    batch_axis: int  # 0, or 1 in transformers that compute on [tokens,B,W]
    layout: tuple[int, ...]  # axes of that activation, from the largest stride to the smallest
    output: Any  # what it returns for one image, as tensors without data


@dataclass(frozen=True)
class Chain:
    """The n blocks of an encoder, in the order in which they run, and the place of everything else among them.

    Places: 0 is the stem, 2i is the i-th block, 2i − 1 what runs between it and the block before, 2n + 2 what runs
    after the last block.
    """

    blocks: tuple[ChainBlock, ...] = ()
    reason: str = ""  # why there are no blocks
    places: Mapping[str, int] = field(default_factory=dict)  # parameter → the first place that uses it
    # module → number of blocks that had begun at the begin of its first call, and at the end of its last one; for a
    # module that is not called itself, from the first call of its parts to the last
    calls: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def began(self, module: str) -> int:
        """The number of blocks that had begun when the module did; a module that is not called is as its parent."""
        while module not in self.calls and module:
            module = module.rpartition(".")[0]
        return self.calls[module][0] if module else 0


class _NoChain(Exception):
    """Why the modules are no chain."""


def find_chain(encoder: nn.Module, size: int, candidates: Sequence[Sequence[str]]) -> Chain:
    """Returns the chain of the first candidate whose modules are one; without blocks, and with the reason, if none is.

    Runs two forward passes on images of size × size px for each candidate. The encoder is unchanged, and torch's
    generator is not used.
    """
    reason = "no modules of it are known as blocks"
    for names in filter(None, candidates):
        try:
            with preserve_modes(encoder):
                # frozen parameters would be missing in autograd's graph, in which places are found
                encoder.requires_grad_(True)
                with torch.enable_grad():
                    two = _Pass(encoder, names, probe_images(encoder, size, 2))
                if missed := set(names) - two.inputs.keys():
                    raise _NoChain(f"its module {min(missed)} is not called")
                places = _places(encoder, two)
                with torch.no_grad():
                    single = _Pass(encoder, names, probe_images(encoder, size, 1))
            return Chain(
                tuple(_block(name, two, single) for name in two.inputs), "", places, _with_holders(encoder, two)
            )
        except _NoChain as error:
            reason = str(error)
        except PROBE_ERRORS as error:
            reason = " ".join(str(error).split())[:120]
    return Chain(reason=reason)


@contextmanager
def preserve_modes(encoder: nn.Module) -> Iterator[None]:
    """Context in which the encoder is in eval mode, on one thread; modes and `requires_grad` are restored at its end.

    On several threads, the same product may be divided among them, and so rounded, in another way the next time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    training = {module: module.training for module in encoder.modules()}
    trains = {parameter: parameter.requires_grad for parameter in encoder.parameters()}
    encoder.eval()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for module, mode in training.items():
            module.training = mode
        for parameter, mode in trains.items():
            parameter.requires_grad_(mode)


def probe_images(encoder: nn.Module, size: int, count: int) -> Tensor:
    """float [count,3,size,size], the same at every call."""
    images = torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))
    return images.to(next(encoder.parameters()).device)


class _Pass:
    """What hooks saw in a forward pass: the calls of the blocks `names`, and of all modules relative to them."""

    def __init__(self, encoder: nn.Module, names: Sequence[str], images: Tensor) -> None:
        self.names = set(names)
        self.running = ""  # the block that runs
        self.inputs: dict[str, Tensor] = {}  # of the blocks, in the order in which they begin
        self.outputs: dict[str, Any] = {}
        self.starts: dict[str, Any] = {}  # block → node of autograd's graph that made its input
        self.ends: dict[str, list[Any]] = {}  # block → nodes that made its outputs
        self.calls: dict[str, tuple[int, int]] = {}  # as in `Chain`, of modules that are called themselves
        with ExitStack() as hooks:
            for name, module in encoder.named_modules():
                hooks.callback(module.register_forward_pre_hook(partial(self._begin, name)).remove)
                hooks.callback(module.register_forward_hook(partial(self._end, name)).remove)
            self.z: Tensor = encoder(images)

    def _begin(self, name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if name in self.names:
            if name in self.inputs:
                raise _NoChain(f"its module {name} is called more than once")
            if self.running:
                raise _NoChain(f"its module {name} runs inside {self.running}")
            if not inputs or not isinstance(inputs[0], Tensor):
                raise _NoChain(f"its module {name} does not take one activation tensor")
            self.running = name
            self.inputs[name], self.starts[name] = inputs[0], inputs[0].grad_fn
        self.calls.setdefault(name, (len(self.inputs), len(self.inputs)))

    def _end(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        if name in self.names:
            self.running = ""
            tensors = list(_tensors(output))
            if not tensors:
                raise _NoChain(f"its module {name} returns no tensor")
            # nodes now, as a later operation in place would change them
            self.outputs[name], self.ends[name] = output, [tensor.grad_fn for tensor in tensors]
        self.calls[name] = (self.calls[name][0], len(self.inputs))


def _block(name: str, of_two: _Pass, of_one: _Pass) -> ChainBlock:
    """The axis that counts images is found by comparing the activations of two images and of one."""
    two, single = of_two.inputs[name], of_one.inputs[name]
    axes = [axis for axis, sizes in enumerate(zip(two.shape, single.shape, strict=True)) if sizes[0] != sizes[1]]
    if len(axes) != 1 or two.shape[axes[0]] != 2 or single.shape[axes[0]] != 1:
        raise _NoChain(f"its module {name} takes {list(two.shape)} for two images, which has no batch axis")
    layout = sorted(range(two.ndim), key=two.stride().__getitem__, reverse=True)
    shape = two.shape[: axes[0]] + two.shape[axes[0] + 1 :]
    return ChainBlock(name, tuple(shape), axes[0], tuple(layout), _without_data(of_one.outputs[name]))


def _with_holders(encoder: nn.Module, seen: _Pass) -> dict[str, tuple[int, int]]:
    """The calls, and those of modules of which only parts are called, as a library's `model` is."""
    spans = dict(seen.calls)
    for name, _ in reversed(list(encoder.named_modules())):  # parts before what holds them
        holder = name.rpartition(".")[0]
        if name in spans and holder not in seen.calls:
            begin, end = spans.get(holder, spans[name])
            spans[holder] = min(begin, spans[name][0]), max(end, spans[name][1])
    return spans


def _places(encoder: nn.Module, seen: _Pass) -> dict[str, int]:
    """Finds where each parameter is used, by walking autograd's graph from each block's output to its input.

    Raises `_NoChain` if what a block computes is also used elsewhere: a coarser candidate may be a chain (DenseNet).
    """
    names = {id(parameter): name for name, parameter in encoder.named_parameters()}
    used: dict[int, set[str]] = {}
    before: list[Any] = []
    for number, block in enumerate(seen.inputs, 1):
        start, ends = seen.starts[block], seen.ends[block]
        used[2 * number - 1 if before else 0] = _parameters([start], before, names)
        used[2 * number] = _parameters(ends, [start], names)
        before = ends
    used[2 * len(seen.inputs) + 2] = _parameters([seen.z.grad_fn], before, names)
    for number, block in enumerate(seen.inputs, 1):
        elsewhere = set().union(*(parameters for use, parameters in used.items() if use != 2 * number))
        if any(name.startswith(f"{block}.") for name in elsewhere):
            raise _NoChain(f"the output of its module {block} is used beyond the next block")
    # the first place is written last, and stays: what both parts of a cut use lies below it
    return {name: use for use in sorted(used, reverse=True) for name in used[use]}


def _parameters(ends: Iterable[Any], stops: Iterable[Any], names: Mapping[int, str]) -> set[str]:
    """Names of the parameters that autograd's graph reaches from `ends` without passing one of `stops`."""
    seen, waiting, parameters = {*stops, None}, list(ends), set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad
            parameters.add(names[id(node.variable)])
        waiting += [following for following, _ in node.next_functions]
    return parameters


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)


def _without_data(output: Any) -> Any:
    """The same tensor, or tuple or list of tensors and other values, with tensors that have a shape only."""
    if isinstance(output, Tensor):
        return torch.empty_like(output, device="meta")
    # not isinstance: a named tuple is not built from an iterator
    if type(output) in (tuple, list):
        return type(output)(map(_without_data, output))
    return output


def zeros(template: Any, like: Tensor) -> Any:
    """The `ChainBlock.output` as zeros on the device of `like`, and of its type where they are no integers."""
    if isinstance(template, Tensor):
        dtype = like.dtype if template.is_floating_point() else template.dtype
        return torch.zeros(template.shape, dtype=dtype, device=like.device)
    if type(template) in (tuple, list):
        return type(template)(zeros(part, like) for part in template)
    return template
