"""The language of the kernels, as far as their control goes, in Python: their source runs without a GPU.

Every role of every program is a thread. Barriers, tickets and integers in memory are real; of a tile of numbers there
is only the name of what TMA put where it lies. So a kernel's source tells which tiles are multiplied and stored, and
whether somebody waits forever.
"""

import ast
import linecache
import operator
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton import knobs

STEPS = 20_000_000
"""Operations on integers, all roles together, after which a kernel counts as endless."""
Role = tuple[int, ...]
"""The number of a program, and of a role in it."""


class World:
    """What the roles of a launch share: who waits for what, and what has happened."""

    def __init__(self, programs: int = 1) -> None:
        self.programs = programs
        self.changed = threading.Condition()
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.live = self.steps = 0
        self.failure: BaseException | None = None
        self.here = threading.local()
        self.named: dict[tuple[int, int], Barrier] = {}
        self.ds: dict[int, Any] = {}
        """By the row from which on TMA stored a tile, whose it is."""
        self.events: list[tuple[Any, ...]] = []

    def record(self, *event: Any) -> None:
        """Something that the role of this thread does: its name, the role, and what else is known of it."""
        what, *more = event
        self.events.append((what, self.here.role, *more))

    def change(self, what: Callable[[], Any]) -> Any:
        """Something that others may wait for."""
        with self.changed:
            result = what()
            self.changed.notify_all()
            return result

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Until others have done something. Fails if a role has, or if all wait for what none of them will do."""
        with self.changed:
            me = threading.get_ident()
            self.waiting[me] = ready
            while not (ready() or self.failure):
                if len(self.waiting) == self.live and not any(done() for done in self.waiting.values()):
                    self.fail(AssertionError(f"all roles wait, {self.here.role} for {what}"))
                else:
                    self.changed.wait()
            del self.waiting[me]
            if self.failure:
                raise self.failure

    def fail(self, failure: BaseException) -> None:
        """Ends all roles."""
        self.failure = self.failure or failure
        self.changed.notify_all()

    def run(self, roles: Sequence[tuple[Role, Callable[[], Any]]], instead: int = 0) -> None:
        """All roles side by side, to their end; meanwhile some of those that live do nothing."""

        def thread(role: Role, work: Callable[[], Any]) -> None:
            self.here.role = role
            failure = None
            try:
                work()
            except BaseException as error:
                failure = error
            with self.changed:
                self.live -= 1
                self.changed.notify_all()
                if failure:
                    self.fail(failure)

        self.change(lambda: setattr(self, "live", self.live + len(roles) - instead))
        threads = [threading.Thread(target=thread, args=role, daemon=True) for role in roles]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        self.change(lambda: setattr(self, "live", self.live + instead))


world = World()


class Numbers:
    """A tile of numbers, or a type or layout of one: whatever is done with it gives another. Its value, or whose it is,
    stays in products."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Numbers()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Numbers()

    def to(self, *_: Any, **__: Any) -> "Numbers":
        return self

    def split(self) -> Any:
        return Numbers(), Numbers()

    __getitem__ = __call__


class Scalar:
    """An integer or a truth, with the operators of the kernels' language."""

    def __init__(self, value: Any) -> None:
        self.value = plain(value)
        world.steps += 1
        assert world.steps < STEPS, "endless"

    def __index__(self) -> int:
        return int(self.value)

    __int__ = __index__

    def __bool__(self) -> bool:
        return bool(self.value)

    def __invert__(self) -> "Scalar":
        return Scalar(not self.value if isinstance(self.value, bool) else ~self.value)

    def __neg__(self) -> "Scalar":
        return Scalar(-self.value)

    def to(self, _: Any) -> "Scalar":
        return Scalar(int(self.value))


def plain(x: Any) -> Any:
    """A Scalar's value."""
    return x.value if isinstance(x, Scalar) else x


def quotient(a: int, b: int) -> int:
    """Rounded towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


ALIKE = "add", "sub", "mul", "truediv", "and", "or", "xor", "lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne"
"""Operators that are the same in Python."""
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, f"__{name}__") for name in ALIKE},
    "floordiv": quotient, "mod": lambda a, b: a - b * quotient(a, b),
}  # fmt: skip


def give_operators(name: str, function: Callable[[Any, Any], Any]) -> None:
    """One operator, for Scalars and for Numbers, which win."""

    def left(self: Scalar, other: Any) -> Any:
        return Numbers() if isinstance(other, Numbers) else Scalar(function(self.value, plain(other)))

    def right(self: Scalar, other: Any) -> Any:
        return Scalar(function(other, self.value))

    for turned, method in (("", left), ("r", right)):
        setattr(Scalar, f"__{turned}{name}__", method)
        setattr(Numbers, f"__{turned}{name}__", lambda self, _: Numbers(self.value))


for _name, _function in OPERATORS.items():
    give_operators(_name, _function)


class Pointer:
    """The address of an integer in memory."""

    def __init__(self, memory: list[int], at: int = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.at + int(other))

    def __sub__(self, other: Any) -> "Pointer":
        return self + -int(other)

    def get(self) -> int:
        assert 0 <= self.at < len(self.memory), "outside"
        return self.memory[self.at]

    def put(self, value: Callable[[int], Any]) -> Scalar:
        """Replaces what is there, and gives it."""

        def exchange() -> int:
            before = self.get()
            self.memory[self.at] = int(value(before))
            return before

        return Scalar(world.change(exchange))


class Memory:
    """Shared memory, or a view of it from row `row` on, of a `share` of its columns. Views of a stage share
    its `cell`."""

    def __init__(self, shape: Sequence[int], cell: Any = None, row: int = 0, share: Any = None) -> None:
        self.shape, self.row, self.share = list(shape), row, share
        self.cell = cell or SimpleNamespace(content=None, stages={}, barrier=None, views={})
        self.dtype = self.layout = Numbers()

    def index(self, i: Any) -> "Memory":
        assert 0 <= int(i) < self.shape[0], "no such stage"
        return self.cell.stages.setdefault(int(i), Memory(self.shape[1:]))

    def slice(self, start: int, length: int, dim: int) -> "Memory":
        shape = [*self.shape[:dim], length, *self.shape[dim + 1 :]]
        share = (start, length, self.shape[1]) if dim == 1 else self.share
        return Memory(shape, self.cell, self.row + (start if dim == 0 else 0), share)

    @property
    def content(self) -> Any:
        """What TMA has put into the columns."""
        found = self.cell.content
        if self.share is None or not isinstance(found, tuple):
            return found
        start, length, columns = self.share
        first, count = (x * (len(found) - 1) // columns for x in (start, length))
        return ("parts", *found[1 + first :][:count])

    def reshape(self, shape: Sequence[int]) -> "Memory":
        return Memory(shape, self.cell, self.row)

    def permute(self, order: Sequence[int]) -> "Memory":
        return Memory([self.shape[i] for i in order], self.cell, self.row)

    def store(self, x: Any) -> None:
        self.cell.content = x

    def load(self, *_: Any) -> Any:
        return self.cell.content if isinstance(self.cell.content, Numbers) else Numbers()


class Panels:
    """The stages of a tile seen as panels of its columns, `count` of each stage, whose rows TMA fills part by part."""

    def __init__(self, memory: Memory, shape: Sequence[int]) -> None:
        self.memory, self.shape, self.count = memory, list(shape), shape[0] // memory.shape[0]

    def index(self, i: Any) -> "Panel":
        stage = self.memory.index(int(i) // self.count)
        return Panel(stage.cell, int(i) % self.count, self.shape[1:])


class Panel:
    """A stage's panel, or `length` of its rows."""

    def __init__(self, cell: Any, panel: int, shape: Sequence[int], row: int = 0) -> None:
        self.cell, self.panel, self.shape, self.row = cell, panel, list(shape), row

    def slice(self, start: int, length: int, dim: int) -> "Panel":
        assert start + length <= self.shape[dim], "no such rows"
        shape = [*self.shape[:dim], length, *self.shape[dim + 1 :]]
        return Panel(self.cell, self.panel, shape, start)

    def store(self, x: tuple[Any, ...]) -> None:
        """Replace what the part held."""
        parts = dict(self.cell.content[1:]) if isinstance(self.cell.content, tuple) else {}
        parts[self.row, self.panel] = x
        self.cell.content = ("parts", *parts.items())


class Barrier:
    """Completes a phase once `count` arrivals and all bytes that they expect are there."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def arrive(self, size: int = 0) -> None:
        assert self.missing, "more arrivals than it counts"
        self.missing -= 1
        self.come(-size)

    def come(self, size: int) -> None:
        self.bytes += size
        if self.missing == self.bytes == 0:
            self.phase += 1
            self.missing = self.count


class Box(SimpleNamespace):
    """A tensor as TMA sees it: a name, the bytes of a box, and its shape."""

    def __init__(self, name: str, size: int = 0, shape: Sequence[int] = ()) -> None:
        block = SimpleNamespace(nbytes=size, shape=shape)
        super().__init__(name=name, block_type=block, layout=Numbers(), dtype=Numbers(), block_shape=[1])


def init(bar: Memory, count: int) -> None:
    bar.cell.barrier = Barrier(count)


def wait(bar: Memory, parity: Any) -> None:
    barrier = bar.cell.barrier
    world.wait(lambda: barrier.phase & 1 != int(parity), "a barrier")


def load(box: Box, at: Sequence[Any], bar: Memory, memory: Memory) -> None:
    memory.store((box.name, *world.ds.get(int(at[0]), ("zeros",))) if box.name == "ds" else (box.name, *map(int, at)))
    world.change(lambda: bar.cell.barrier.come(box.block_type.nbytes))


def store(box: Box, at: Sequence[Any], memory: Any) -> None:
    if box.name == "ds":
        world.ds[int(at[0])] = memory.content.value
    else:
        world.record("stored", box.name, *map(int, at))


def multiply(a: Any, b: Any, *_: Any, **__: Any) -> Numbers:
    """A product. It is recorded which factors TMA has loaded: both, and from which row on the first, or the right one
    of a left one in registers."""
    right = b.cell.content
    if isinstance(right, tuple):
        if not isinstance(a, Memory):
            world.record("weighed", right)
        elif isinstance(a.content, tuple):
            world.record("product", a.content, a.row, right)
    return Numbers()


def wait_equal(at: Pointer, value: Any) -> None:
    """In place of polling."""
    world.wait(lambda: at.get() == int(value), "a number in memory")


def named_barrier(op: str, who: int) -> None:
    """In place of a named barrier, of two warpgroups of a program."""
    barrier = world.named.setdefault((world.here.role[0], who), Barrier(2))

    def arrive() -> int:
        phase = barrier.phase
        barrier.arrive()
        return phase

    phase = world.change(arrive)
    if op == "sync":
        world.wait(lambda: barrier.phase > phase, "a named barrier")


def load_number(at: Any, *_: Any, mask: Any = True, other: Any = None, **__: Any) -> Any:
    """What an address holds, where it is asked for."""
    if not isinstance(at, Pointer):
        return Numbers()
    return Scalar(at.get() if isinstance(mask, Numbers) or mask else other)


def reinterpret(memory: Memory, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    """The same memory in another type, or in panels of its columns."""
    in_panels = len(shape) == 5 and shape[0] * shape[-1] == memory.shape[0] * memory.shape[-1]
    if isinstance(memory, Memory) and len(shape) == 3:
        return memory.cell.views.setdefault(tuple(shape), Memory(shape))
    return Panels(memory, shape) if in_panels else Memory(shape)


class Language:
    """Both `gl` and `tl`."""

    constexpr = staticmethod(lambda x: x)
    static_range = range
    cast = staticmethod(lambda x, _: x)
    where = staticmethod(lambda c, a, b: Numbers() if isinstance(c, Numbers) else a if c else b)
    minimum = staticmethod(lambda a, b: a if plain(a) < plain(b) else b)
    maximum = staticmethod(lambda a, b: a if plain(a) > plain(b) else b)
    cdiv = staticmethod(lambda a, b: Scalar(-(-int(a) // int(b))))
    full = staticmethod(lambda shape, value, *_: Numbers(value))
    split = staticmethod(lambda _: (Numbers(), Numbers()))
    max = staticmethod(lambda x, _: x.value)
    load = staticmethod(load_number)
    store = staticmethod(lambda at, x, **_: at.put(lambda _: x) if isinstance(at, Pointer) else None)
    atomic_add = staticmethod(lambda at, x, **_: at.put(lambda old: old + int(x)))
    atomic_max = staticmethod(lambda at, x, **_: at.put(lambda old: max(old, int(x))))
    atomic_xchg = staticmethod(lambda at, x, **_: at.put(lambda _: x))
    program_id = staticmethod(lambda _: Scalar(world.here.role[0]))
    num_programs = staticmethod(lambda _: Scalar(world.programs))
    allocate_shared_memory = staticmethod(lambda _, shape, *__: Memory(shape))

    def __getattr__(self, name: str) -> Any:
        return Numbers()

    @staticmethod
    def warp_specialize(partitions: Sequence[tuple[Any, Any]], *_: Any) -> None:
        program = world.here.role[0]
        world.run([((program, n), lambda f=f, a=a: f(*a)) for n, (f, a) in enumerate(partitions)], instead=1)


language = Language()
NAMES = {
    "gluon": None, "triton": SimpleNamespace(knobs=knobs), "whole": lambda x: x, "gl": language, "tl": language,
    "mbarrier": SimpleNamespace(
        init=init, wait=wait, MBarrierLayout=Numbers, arrive=lambda bar: world.change(bar.cell.barrier.arrive),
        expect=lambda bar, size: world.change(lambda: bar.cell.barrier.arrive(size)),
    ),
    "tma": SimpleNamespace(store_wait=lambda _: None), "fence_async_shared": lambda: None,
    "warpgroup_mma": multiply, "warpgroup_mma_wait": lambda _, x: x if len(x) > 1 else x[0],
    "triton_compat": SimpleNamespace(
        load=load, barrier=lambda: None, reinterpret=reinterpret,
        store=store,
        reduce_add=lambda box, at, _: world.record("added", int(at[0])),
    ),
}  # fmt: skip
"""What kernels import, by the names that they give it."""


class Inversions(ast.NodeTransformer):
    """~x as a call: of a truth that Python has found, ~ would be -1 or -2, both true."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Invert):
            return node
        return ast.copy_location(ast.Call(ast.Name("inverted", ast.Load()), [node.operand], []), node)


def inverted(x: Any) -> Any:
    return not x if isinstance(x, bool) else ~x


@lru_cache
def functions(module: str) -> dict[str, Any]:
    """A module of kernels as plain functions, by name."""
    path = Path(str(import_module(module).__file__))
    names = functions_of(path.read_text(), module, str(path))
    names |= INSTEAD.get(module, {})  # for its own functions, too
    return names


def emitted(function: Any) -> Any:
    """A device function that is made of a program (tilewise/host/emit.py), as a plain function."""
    code, module = function.fn.__code__, "tilewise.host.emitted"
    text = "from ..tile.arithmetic import inside, whole\n" + "".join(linecache.getlines(code.co_filename))
    return functions_of(text, module, code.co_filename)[code.co_name]


def functions_of(text: str, module: str, path: str) -> dict[str, Any]:
    """A source of kernels as plain functions, by name."""
    names: dict[str, Any] = {"__name__": module, "inverted": inverted}
    body = []
    for node in ast.fix_missing_locations(Inversions().visit(ast.parse(text))).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            source = resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
            names |= {one.name: functions(source)[one.name] for one in node.names if one.name not in NAMES}
        elif not isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "module", "") == "typing":
            body.append(node)
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []
    names |= NAMES
    exec(compile(ast.Module(body, []), path, "exec"), names)
    return names


INSTEAD: dict[str, dict[str, Any]] = {
    "tilewise.hopper.parts.channel": {"wait_equal": wait_equal, "named_barrier": named_barrier}
}
"""By module, functions that others do not import as they are written."""
