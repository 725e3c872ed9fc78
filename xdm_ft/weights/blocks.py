"""The blocks of an encoder: their names per family, and a probe pass that finds the chain that they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FIRST_STAGE = 4  # stages begin at 1/4 of the resolution; what timm lists before (a ResNet's first ReLU) is stem


class StageNames(NamedTuple):
    """Names of an encoder's modules, in the order in which they run; see `Encoder`."""

    stem: tuple[str, ...]
    stages: tuple[str, ...]
    transitions: tuple[str, ...]

    @classmethod
    def with_prefix(
        cls, root: str, stem: Iterable[str], stages: Iterable[str], transitions: Iterable[str]
    ) -> StageNames:
        """These names of a model's modules with `root`, the name of the model in the encoder, in front."""
        return cls(*(tuple(f"{root}.{name}" for name in names) for names in (stem, stages, transitions)))


def timm_stage_names(model: nn.Module, root: str) -> StageNames:
    """Stages are those of timm's feature extraction; none for a model that does not support it."""
    from timm.models.densenet import DenseTransition

    modules = dict(model.named_modules())
    listed = [info for info in getattr(model, "feature_info", None) or () if info["module"] in modules]
    stages = [info["module"] for info in listed if info["reduction"] >= FIRST_STAGE]
    transitions = [name for name, module in modules.items() if isinstance(module, DenseTransition)]
    return StageNames.with_prefix(root, _stem(modules, stages), stages, transitions)


def _stem(modules: dict[str, nn.Module], stages: list[str]) -> list[str]:
    """The first convolution and the first max-pool before the first stage."""
    names = list(modules)
    before = names[: names.index(stages[0])] if stages else names
    of_kind = ([name for name in before if isinstance(modules[name], kind)] for kind in (nn.Conv2d, nn.MaxPool2d))
    return [name for found in of_kind for name in found[:1]]


def timm_blocks(model: Any, root: str) -> list[list[str]]:
    """Candidates for a model of timm: its own layers for layer-wise decay, coarser ones, its stages.

    A MobileNetV3's final convolution, which timm counts as a layer, is none.
    """
    from timm.models._efficientnet_blocks import ConvBnAct

    modules = dict(model.named_modules())
    candidates = []
    for coarse in (False, True):
        matcher = model.group_matcher(coarse=coarse) if hasattr(model, "group_matcher") else None
        if isinstance(matcher, Mapping):
            candidates.append(_matched(model, _patterns(matcher)))
    candidates.append([info["module"] for info in getattr(model, "feature_info", None) or ()])
    found = []
    for names in candidates:
        # a block is a composed module or a convolution (VGG); not a norm or an activation by itself
        blocks = [name for name in names if name in modules and _is_block(modules[name])]
        if blocks and isinstance(modules[blocks[-1]], ConvBnAct):
            del blocks[-1]
        found.append([f"{root}.{name}" for name in blocks])
    return found


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) or any(module.children())


def _patterns(matcher: Mapping[str, Any]) -> list[tuple[re.Pattern[str], bool]]:
    """Pattern of a parameter's name, and whether what it matches is the name of a block.

    A pattern of timm that has a suffix is that of modules between blocks, which it counts to the next or last block.
    """
    patterns = []
    for entry in matcher.values():
        for pattern, suffix in [(entry, None)] if isinstance(entry, str) else entry or ():
            compiled = re.compile(pattern)
            patterns.append((compiled, suffix is None and compiled.groups > 0))
    return patterns


def _matched(model: nn.Module, patterns: Sequence[tuple[re.Pattern[str], bool]]) -> list[str]:
    names: dict[str, None] = {}
    for parameter, _ in model.named_parameters():
        for pattern, is_block in patterns:
            match = pattern.match(parameter)
            if match is not None:
                if is_block:
                    names[match.group()] = None
                break
    return list(names)


def clip_blocks(visual: Any, root: str) -> list[list[str]]:
    """Candidates for the image side of a CLIP: layers of its transformer or ResNet, or timm's image trunk."""
    if hasattr(visual, "trunk"):
        return timm_blocks(visual.trunk, f"{root}.trunk")
    layers = r"transformer\.resblocks\.\d+|layer\d+\.\d+"
    return [[f"{root}.{name}" for name, _ in visual.named_modules() if re.fullmatch(layers, name)]]


PROBE_ERRORS = (RuntimeError, AssertionError, ValueError, TypeError, IndexError, AttributeError, KeyError)


@dataclass(frozen=True)
class Block:
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

    blocks: tuple[Block, ...] = ()
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


def find_chain(encoder: nn.Module, size: int, candidates: Sequence[Sequence[str]]) -> Chain:
    """Returns the chain of the first candidate whose modules are one; without blocks, and with the reason, if none is.

    Runs two forward passes on images of size × size px for each candidate. The encoder is unchanged, and torch's
    generator is not used.
    """
    reason = "no modules of it are known as blocks"
    for names in candidates:
        if not names:
            continue
        try:
            return _Probe(encoder, size, names).chain()
        except _NoChain as error:
            reason = str(error)
        except PROBE_ERRORS as error:
            reason = " ".join(str(error).split())[:120]
    return Chain(reason=reason)


class _NoChain(Exception):
    """Why the modules are no chain."""


@contextmanager
def undisturbed(encoder: nn.Module) -> Iterator[None]:
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


class _Probe:
    """The calls of the modules in `names` in a forward pass, and those of all other modules relative to them."""

    def __init__(self, encoder: nn.Module, size: int, names: Sequence[str]) -> None:
        self.encoder, self.size, self.names = encoder, size, set(names)
        self.order: list[str] = []  # of the blocks, as they begin
        self.open: list[str] = []  # blocks that run
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Any] = {}
        self.starts: dict[str, Any] = {}  # block → node of autograd's graph that made its input
        self.ends: dict[str, list[Any]] = {}  # block → nodes that made its outputs
        self.calls: dict[str, tuple[int, int]] = {}

    def chain(self) -> Chain:
        with undisturbed(self.encoder):
            self.encoder.requires_grad_(True)
            with torch.enable_grad():
                z = self._pass(2)
            order, two, calls = tuple(self.order), self.inputs, self.calls
            missed = self.names - set(order)
            if missed:
                raise _NoChain(f"its module {min(missed)} is not called")
            places = self._places(z)
            with torch.no_grad():
                self._pass(1)
        blocks = []
        for name in order:
            axis = _batch_axis(name, two[name], self.inputs[name])
            shape, strides = two[name].shape, two[name].stride()
            layout = sorted(range(len(shape)), key=strides.__getitem__, reverse=True)
            one = without_data(self.outputs[name])
            blocks.append(Block(name, (*shape[:axis], *shape[axis + 1 :]), axis, tuple(layout), one))
        return Chain(tuple(blocks), "", places, self._with_holders(calls))

    def _pass(self, images: int) -> Tensor:
        self.order, self.inputs, self.outputs, self.calls = [], {}, {}, {}
        with ExitStack() as hooks:
            for name, module in self.encoder.named_modules():

                def begin(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
                    self._begin(name, inputs)

                def end(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                    self._end(name, output)

                hooks.callback(module.register_forward_pre_hook(begin).remove)
                hooks.callback(module.register_forward_hook(end).remove)
            z: Tensor = self.encoder(probe_images(self.encoder, self.size, images))
        return z

    def _with_holders(self, calls: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """`calls`, and those of modules of which only parts are called, as a library's `model` is."""
        spans = dict(calls)
        for name, _ in reversed(list(self.encoder.named_modules())):  # parts before what holds them
            holder = name.rpartition(".")[0]
            if name in spans and holder not in calls:
                begin, end = spans.get(holder, spans[name])
                spans[holder] = min(begin, spans[name][0]), max(end, spans[name][1])
        return spans

    def _begin(self, name: str, inputs: tuple[Any, ...]) -> None:
        if name in self.names:
            if name in self.order:
                raise _NoChain(f"its module {name} is called more than once")
            if self.open:
                raise _NoChain(f"its module {name} runs inside {self.open[-1]}")
            if not inputs or not isinstance(inputs[0], Tensor):
                raise _NoChain(f"its module {name} does not take one activation tensor")
            self.order.append(name)
            self.open.append(name)
            self.inputs[name], self.starts[name] = inputs[0], inputs[0].grad_fn
        self.calls.setdefault(name, (len(self.order), len(self.order)))

    def _end(self, name: str, output: Any) -> None:
        if name in self.names:
            self.open.remove(name)
            tensors = list(_tensors(output))
            if not tensors:
                raise _NoChain(f"its module {name} returns no tensor")
            self.outputs[name], self.ends[name] = output, [tensor.grad_fn for tensor in tensors]
        self.calls[name] = (self.calls[name][0], len(self.order))

    def _places(self, z: Tensor) -> dict[str, int]:
        """Finds where each parameter is used, by walking autograd's graph from each block's output to its input."""
        names = {id(parameter): name for name, parameter in self.encoder.named_parameters()}
        used: dict[int, set[str]] = {}
        before: list[Any] = []
        for number, block in enumerate(self.order, 1):
            used[2 * number - 1 if before else 0] = _parameters([self.starts[block]], before, names)
            used[2 * number] = _parameters(self.ends[block], [self.starts[block]], names)
            before = self.ends[block]
        used[2 * len(self.order) + 2] = _parameters([z.grad_fn], before, names)
        for number, block in enumerate(self.order, 1):
            others = set().union(*(found for place, found in used.items() if place != 2 * number))
            if any(name.startswith(f"{block}.") for name in others):
                raise _NoChain(f"what its module {block} computes is used beyond the next block")
        return {name: place for place in sorted(used, reverse=True) for name in used[place]}


def _parameters(ends: Iterable[Any], stops: Iterable[Any], names: Mapping[int, str]) -> set[str]:
    """Names of the parameters that autograd's graph reaches from `ends` without passing one of `stops`."""
    seen = {node for node in stops if node is not None}
    waiting = [node for node in ends if node is not None and node not in seen]
    found = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad
            found.add(names[id(node.variable)])
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _batch_axis(name: str, two: Tensor, one: Tensor) -> int:
    """The axis that counts images, from the activations of two images and of one."""
    axes = [axis for axis, sizes in enumerate(zip(two.shape, one.shape, strict=True)) if sizes[0] != sizes[1]]
    if len(axes) != 1 or two.shape[axes[0]] != 2 or one.shape[axes[0]] != 1:
        raise _NoChain(f"its module {name} takes {list(two.shape)} for two images, which has no batch axis")
    return axes[0]


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)


def without_data(output: Any) -> Any:
    """The same tensor, or tuple or list of tensors and other values, with tensors that have a shape only."""
    if isinstance(output, Tensor):
        return torch.empty_like(output, device="meta")
    if type(output) in (tuple, list):
        return type(output)(map(without_data, output))
    return output


def zeros(template: Any, like: Tensor) -> Any:
    """What `without_data` returned, as zeros on the device of `like`, and of its type where they are no integers."""
    if isinstance(template, Tensor):
        dtype = like.dtype if template.is_floating_point() else template.dtype
        return torch.zeros(template.shape, dtype=dtype, device=like.device)
    if type(template) in (tuple, list):
        return type(template)(zeros(part, like) for part in template)
    return template
