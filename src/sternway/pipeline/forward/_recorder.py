"""Notes which part of a forward uses, makes and changes what, while all of it runs; and what must not be cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sternway._torch.memory import rng_state
from sternway._torch.modes import own_buffers
from sternway._torch.tensors import storage_id, version_of
from sternway.pipeline.forward._absent import tensors_in
from sternway.pipeline.forward._flow import Flow, Obstacle
from sternway.pipeline.forward._follow import PIECE, Follower, Key
from sternway.pipeline.forward._left import HeldTensor, LeftValue
from sternway.pipeline.forward._names import (
    FROM_PYTHON,
    RANDOM,
    backward_inputs,
    function_name,
    generator_state,
    own_generators,
    python_random_state,
    user_line,
)
from sternway.pipeline.forward._objects import GivenObjects, is_cache

_OUTPUT = "return what other code needs, or pass the stages yourself, as {index: module}"
_SHARED = "a value is changed in place through another tensor that shares its memory, in another stage"
_SHARED_FIX = "cut before both or after both, or change a copy"


class Recorder(Follower):
    """Follows a forward whose pieces all run, and notes in ``flow`` what uses what."""

    def __init__(
        self,
        model: nn.Module,
        pieces: Mapping[str, nn.Module],
        batch: list[Tensor],
        left: Sequence[LeftValue] = (),
    ) -> None:
        self._names = names_of_kept(model, pieces)
        kept = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        super().__init__({key: tensor for key, tensor in kept.items() if key in self._names})
        self._drawn = self._python  # the state when glue began
        self._generators = own_generators(model)
        self._of_generators = self._where_generators_are()
        self.flow = Flow()
        self._pieces = pieces
        self._batch: dict[int, list[int]] = {}  # one tensor may be several arguments
        for leaf, tensor in enumerate(batch):
            self._batch.setdefault(id(tensor), []).append(leaf)
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers() if id(buffer) not in self._names}
        self._numbers: Counter[str] = Counter()
        self._given: set[int] = set()  # what the piece that runs was called with
        self._values: dict[int, Tensor] = {}  # all values that have a key, so that no id is used twice
        self._writes: dict[int, tuple[int, int]] = {}  # storage: the segment that last changed it, and through what
        self._made_inside: dict[int, tuple[Tensor, int]] = {}  # made by a piece, and perhaps not returned
        self._random: set[Key] = set()
        self._left = {id(value.tensor): value for value in left}  # by the forward before, and what glue makes of it
        self.uses_of_left: list[Obstacle] = []
        self._as_tensor = False  # whether what glue last drew with Python was made a tensor, which is sent
        self._changed: dict[str, set[int]] = {}  # buffers of pieces: the segments that change them
        self._work: list[
            tuple[int, list[Key], list[tuple[Tensor, list[Key]]]]
        ] = []  # of each call: its segment, what it used and made
        self._aliases: dict[
            int, list[Key]
        ] = {}  # of values that a function returned as they are: the keys it gave them

    # Pieces

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A piece is called."""
        if self._aside:  # inside another one
            self._use_kept(self._pieces[name])
            return forward(*args, **kwargs)
        self._note_python()
        self.flow.calls.append((name, self._numbers[name]))
        self._numbers[name] += 1
        self.next_segment()
        given = tensors_in(args, kwargs)
        self._given = {id(tensor) for tensor in given}
        self.use(given)
        used = self._keys_of(given)
        self._use_kept(self._pieces[name])
        versions = {key: version_of(tensor) for key, tensor in self._values.items()}
        state = [[(b, version_of(b)) for b in own_buffers([each])] for each in self._pieces[name].modules()]
        objects = GivenObjects(args, kwargs)
        self._aside = True
        try:
            result = forward(*args, **kwargs)
        finally:
            self._aside = False
        self._drawn, self._of_generators = python_random_state(), self._where_generators_are()
        if (changed := objects.changed()) is not None and not is_cache(changed):
            what = f"{name} changes a {type(changed).__name__} that it is called with, which no other stage would see"
            self._forbid(what, self.segment, None, _OUTPUT)
        for key, version in versions.items():
            if version_of(self._values[key]) != version:
                self._writes[storage_id(self._values[key])] = self.segment, 0
        changed_state = [own for own in state if any(version_of(buffer) != version for buffer, version in own)]
        for buffer in (buffer for own in changed_state for buffer, _ in own):  # batch norms do not count all they write
            for each in self._names.get(id(buffer), ()):
                self._changed.setdefault(each, set()).add(self.segment)
        if self._numbers[name] > 1 and changed_state:
            self._forbid(
                f"{name} is called twice and changes its buffers, so both calls must be in one stage",
                self._first_call(name),
                self.segment,
                "cut before or after both",
            )
        results = tensors_in(result)
        self._name_all((self.segment, PIECE, 0, 0), results)
        changed = [tensor for key, tensor in self._values.items() if version_of(tensor) != versions.get(key)]
        self._note_work(used, [*results, *changed])
        return result

    def _note_python(self) -> None:
        """A stretch of glue ends: look whether it drew with Python or numpy what is a number, and no tensor."""
        now = python_random_state()
        self.flow.draws_python |= now != self._drawn and not self._as_tensor
        self._drawn, self._as_tensor = now, False
        for name, state in self._where_generators_are().items():
            if state != self._of_generators[name]:
                what = f"code between the modules draws from {name}, and no two stages would draw alike"
                got = f"a {type(self._generators[name]).__name__}"
                fix = "draw with random or numpy.random, or inside a module"
                self.flow.obstacles.append(Obstacle(what, 0, None, got, fix))

    def _where_generators_are(self) -> dict[str, bytes]:
        return {name: generator_state(generator) for name, generator in self._generators.items()}

    def _note_work(self, used: list[Key], made: list[Tensor]) -> None:
        self._work.append((self.segment, used, [(tensor, self._all_keys(tensor)) for tensor in made]))

    def _keys_of(self, tensors: list[Tensor]) -> list[Key]:
        return [key for tensor in tensors for key in self._all_keys(tensor)]

    def _first_call(self, name: str) -> int:
        return 1 + self.flow.calls.index((name, 0))

    def _use_kept(self, module: nn.Module) -> None:
        for tensor in [*module.parameters(), *module.buffers()]:
            for name in self._names.get(id(tensor), ()):
                self.flow.kept.setdefault(name, set()).add(self.segment)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._aside:
            self.flow.makes_tensors |= function_name(func) in FROM_PYTHON
            return super().__torch_function__(func, types, args, kwargs)
        given = tensors_in(args, kwargs)
        for tensor in given:
            for name in self._names.get(id(tensor), ()):
                self.flow.kept.setdefault(name, set()).add(self.segment)
        self._use_left(given)
        self._check_backward(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        known = {*map(id, given), *self._names, *self._batch}  # what it is given may come back, as from x.to(x.dtype)
        for tensor in tensors_in(result):
            if self.key_of(tensor) is None and id(tensor) not in known:
                self._made_inside[id(tensor)] = tensor, self.segment
        return result

    # Glue

    def free(self, function: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in(args, kwargs)
        for tensor in tensors:
            for leaf in self._batch.get(id(tensor), ()):
                self.flow.batch_free.setdefault(leaf, self.segment)
            self._check_inside(tensor)
        before = [version_of(tensor) for tensor in tensors]
        state = rng_state()
        result = function(*args, **kwargs)
        if state != rng_state():
            self._forbid(
                f"{function_name(function)} draws random numbers outside of the model's modules, which no two ranks "
                "would draw alike",
                self.segment,
                None,
                "draw them inside a module",
            )
        self._note_buffers(tensors, before)
        if found := next((self._left[id(tensor)] for tensor in tensors if id(tensor) in self._left), None):
            self._left |= {id(made): LeftValue(found.name, made, found.segment) for made in tensors_in(result)}
        return result

    def read(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        self.use(tensors)
        keys = [self.key_of(tensor) for tensor in tensors if self.depends(tensor)]
        if all(key is not None and key in self._random for key in keys):
            self.flow.of_all.update(key for key in keys if key is not None)
        else:
            self._forbid(
                f"code between the modules reads a value that they computed ({function_name(function)}), and code "
                "of a later stage would have to take the same way",
                self.segment,
                None,
                "cut after it, or move it into a module",
                is_seen=True,
            )
        return function(*args, **kwargs)

    def glue(self, key: Key, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        self.use(tensors)
        self._check_backward(function, args, kwargs)
        before = [version_of(tensor) for tensor in tensors]
        sources = [self.key_of(tensor) for tensor in tensors if self.depends(tensor)]
        used = self._keys_of(tensors)
        result = function(*args, **kwargs)
        self._note_buffers(tensors, before)
        self._as_tensor |= key[1] in FROM_PYTHON
        made = [tensor for tensor in tensors_in(result) if all(tensor is not other for other in tensors)]
        written = [i for i, tensor in enumerate(tensors) if version_of(tensor) != before[i]]
        self._name_all(key, tensors_in(result), skip=tensors)
        for place in written:
            self._writes[storage_id(tensors[place])] = self.segment, id(tensors[place])
            self.name_written(tensors[place])
            self._name(tensors[place], (*key[:3], -1 - place))
        changed = [tensors[place] for place in written]
        self._note_work(used, [*tensors_in(result), *changed])
        if all(source is not None and source in self._random for source in sources) and (
            sources or key[1] in RANDOM | FROM_PYTHON
        ):
            self._random.update(found for tensor in made if (found := self.key_of(tensor)) is not None)
        return result

    def _note_buffers(self, tensors: list[Tensor], before: list[int]) -> None:
        for tensor, version in zip(tensors, before, strict=True):
            if version_of(tensor) != version and id(tensor) in self._buffers:
                self._forbid_buffer(self._buffers[id(tensor)])

    def note_replaced(self, model: nn.Module) -> None:
        """After the forward: look whether code between the pieces has put another tensor in the place of a buffer."""
        now = dict(model.named_buffers(remove_duplicate=False))
        for key, name in self._buffers.items():
            if id(now.get(name)) != key:
                self._forbid_buffer(name, f"another tensor there after the forward of {type(model).__name__}")

    def _forbid_buffer(self, name: str, got: str | None = None) -> None:
        what = f"code between the modules changes the buffer {name}, and every stage runs it"
        self.flow.obstacles.append(Obstacle(what, 0, None, got or user_line(), "change it inside a module"))

    # Values

    def finish(self, results: list[Tensor]) -> None:
        """The forward returned these. Find which uses of values lead to them."""
        self.use(results)
        self._note_python()
        for name, segments in self._changed.items():
            places = segments | self.flow.kept.get(name, set())
            if len(places) > 1:
                what = f"{name} is changed by one module and used by other code, so both must be in one stage"
                got = f"a buffer that {self.flow.calls[min(segments) - 1][0]} changes"
                self.flow.obstacles.append(Obstacle(what, min(places), max(places), got, "cut before or after both"))
        live = set(self._keys_of([tensor for tensor in results if tensor.requires_grad]))
        for key in live:
            self.flow.live.setdefault(key, set()).add(self.segment)
        for segment, used, made in reversed(self._work):
            if any(tensor.requires_grad and live.intersection(keys) for tensor, keys in made):
                live.update(used)
                for key in used:
                    self.flow.live.setdefault(key, set()).add(segment)

    def _all_keys(self, tensor: Tensor) -> list[Key]:
        key = self.key_of(tensor)
        return [] if key is None else [key, *self._aliases.get(id(tensor), ())]

    def left_behind(self, before: dict[int, HeldTensor], after: dict[int, HeldTensor]) -> list[LeftValue]:
        """Values of the model's work that are in attributes, given what these had before the forward and after it."""
        found = []
        for name, tensor, version in after.values():
            old, inside, key = before.get(id(tensor)), self._made_inside.get(id(tensor)), self.key_of(tensor)
            write = self._writes.get(storage_id(tensor)) if type(tensor) is Tensor else None
            if old is not None and old.tensor is tensor:
                segment = write[0] if write is not None and old.version != version else None
            elif key is not None:
                segment = key[0]
            else:
                segment = inside[1] if inside is not None and inside[0] is tensor else None
            if segment is not None:
                found.append(LeftValue(name, tensor, segment))
        return found

    def _use_left(self, tensors: list[Tensor]) -> None:
        for tensor in tensors if self._left else ():
            value = self._left.get(id(tensor))
            if value is not None and value.segment != self.segment:
                what = f"{value.name} is left by one forward and used by the next, in another stage"
                first, last = sorted((value.segment, self.segment))
                self.uses_of_left.append(Obstacle(what, first, last, user_line(), "cut before or after both places"))

    def use(self, tensors: list[Tensor]) -> None:
        """This segment uses these."""
        self._use_left(tensors)
        for tensor in tensors:
            key = self.key_of(tensor)
            if key is not None:
                for each in self._all_keys(tensor):
                    self.flow.uses.setdefault(each, set()).add(self.segment)
                self._check_alias(tensor, key)
            elif id(tensor) in self._batch:
                for leaf in self._batch[id(tensor)]:
                    self.flow.batch_used.setdefault(leaf, set()).add(self.segment)
            elif id(tensor) in self._names:
                for name in self._names[id(tensor)]:
                    self.flow.kept.setdefault(name, set()).add(self.segment)
            else:
                self._check_inside(tensor)
                if type(tensor) is Tensor and (write := self._writes.get(storage_id(tensor))) is not None:
                    self._forbid(_SHARED, write[0], self.segment, _SHARED_FIX)

    def _check_inside(self, tensor: Tensor) -> None:
        inside = self._made_inside.get(id(tensor))
        if inside is not None and inside[0] is tensor:
            name = self.flow.calls[inside[1] - 1][0]
            for made in (inside[1], self.segment):  # later stages would not find it either
                self._forbid(f"{name} makes a value that other code uses, but does not return it", made, None, _OUTPUT)

    def _check_alias(self, tensor: Tensor, key: Key) -> None:
        """A value that was changed through another tensor, in a stage that has its own copy of it, is not changed."""
        write = self._writes.get(storage_id(tensor)) if type(tensor) is Tensor else None
        if write is not None and write[1] != id(tensor) and write[0] > key[0]:
            self._forbid(_SHARED, key[0], write[0], _SHARED_FIX)

    def _check_backward(self, function: Any, args: Any, kwargs: Any) -> None:
        """A backward that the forward runs itself goes through the whole graph from its end to its inputs."""
        inputs = backward_inputs(function, args, kwargs)
        if inputs is None:
            return
        firsts = [first for first in map(self._first_use, inputs) if first < self.segment]
        if firsts or not inputs:
            made, fix = (
                min(firsts, default=0),
                "cut before or after all of it, or let one module do it, on a detached x",
            )
            what = "the forward runs a backward of its own, and one stage must have all of its graph"
            self._forbid(what, made, self.segment, fix)

    def _first_use(self, tensor: Tensor) -> int:
        """The segment where a value is made, or a tensor of the batch is first used; 0 if that is not known."""
        key = self.key_of(tensor)
        if key is not None:
            return key[0]
        if id(tensor) in self._names or (self._aside and id(tensor) not in self._given):
            return self.segment
        uses = [self.flow.batch_used.get(leaf, set()) for leaf in self._batch.get(id(tensor), ())]
        return min(set().union(*uses), default=0)

    def _name_all(self, key: Key, results: list[Tensor], skip: list[Tensor] | None = None) -> None:
        for place, tensor in enumerate(results):
            if all(tensor is not other for other in skip or ()):
                self._name(tensor, (*key[:3], place))
            else:  # as dropout does in evaluation
                self._aliases.setdefault(id(tensor), []).append((*key[:3], place))

    def _name(self, tensor: Tensor, key: Key) -> None:
        if id(tensor) in self._names:
            return
        self.name_value(tensor, key)
        self._aliases.pop(id(tensor), None)
        self._values[id(tensor)] = tensor
        self._made_inside.pop(id(tensor), None)

    def _forbid(self, what: str, made: int, used: int | None, fix: str, is_seen: bool = False) -> None:
        self.flow.obstacles.append(Obstacle(what, made, used, user_line(), fix, is_seen))


def names_of_kept(model: nn.Module, pieces: Mapping[str, nn.Module]) -> dict[int, list[str]]:
    """All names of each parameter, and of each buffer inside a piece, by the tensor's id."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    inside = {id(buffer) for piece in pieces.values() for buffer in piece.buffers()}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if id(buffer) in inside:
            names.setdefault(id(buffer), []).append(name)
    return names
