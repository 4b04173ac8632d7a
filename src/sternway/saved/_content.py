"""The bytes of one slot, and where they are.

    data    away    arrival
    ────    ────    ───────
    here                       on the device
    here    there              in flight: the copy out is under way
            there              off the device
            there   coming     the copy back is under way

Only this class changes these fields, and it reports each change to the module's line of the report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sternway._torch.tensors import version_of
from sternway.errors import SavedError
from sternway.saved.policies._codecs import Codec
from sternway.saved.stores._store import Arrival, Away, Store

if TYPE_CHECKING:
    from sternway.saved._report import Line


class SavedBytes:
    """The bytes of one storage at one version, perhaps encoded, on the device or off it.

    Attributes:
        nbytes: how many there are.
        number: their place in the order of packing, in this round.
        data: the bytes on the device, or None.
        away: the bytes in a store, or None.
        arrival: the copy back, while it is under way.
    """

    __slots__ = (
        "_alias",
        "_at_version",
        "_changed",
        "_codec",
        "_dtype",
        "_line",
        "_lossless",
        "_packs",
        "_raw_bytes",
        "_uses",
        "_watched",
        "arrival",
        "away",
        "data",
        "nbytes",
        "number",
    )

    def __init__(
        self, flat: Tensor, dtype: torch.dtype, users: Tensor | None, codec: Codec | None, line: Line, *, lossless: bool
    ) -> None:
        self._dtype, self._codec, self._line, self._lossless = dtype, codec, line, lossless
        self._raw_bytes = flat.numel()
        # The user's own tensor, if these are its bytes: .detach() shares the version counter.
        self._alias = users.detach() if users is not None else None
        self._at_version = version_of(users) if users is not None else 0
        self._changed = False
        self._watched: tuple[tuple[Tensor, int], ...] = ()  # tensors in the same bytes that count writes by themselves
        self._packs = self._uses = 0  # saved tensors, and how many of them the backward has yet to use
        self.data: Tensor | None = flat if codec is None else codec.encode(flat.view(dtype))
        self.away: Away | None = None
        self.arrival: Arrival | None = None
        self.number = -1
        self.nbytes = self.data.numel()
        line.new(self._raw_bytes, self.nbytes, codec is not None)
        line.hold(self.nbytes)

    # For whoever saves and uses tensors

    @property
    def is_users(self) -> bool:
        """Whether these are the bytes of the user's own tensor, on the device."""
        return self._alias is not None

    @property
    def is_changed(self) -> bool:
        """Whether the user changed the bytes in place before there was a copy of them."""
        self._check()
        return self._changed

    def watch(self, alias: Tensor) -> None:
        """Take the bytes for changed, too, if this tensor is, which has the same ones but counts by itself."""
        if self._alias is not None:
            self._watched += ((alias, version_of(alias)),)

    def saved(self) -> None:
        """One more saved tensor needs these bytes."""
        self._packs += 1
        self._uses += 1

    def own(self) -> None:
        """Copy the bytes, because the user is about to write to them."""
        assert self.data is not None
        self._check()
        self.data = self.data.clone()
        self._alias, self._watched = None, ()

    def decoded(self, data: Tensor) -> Tensor:
        """The bytes before encoding, from those that came back."""
        self._check()
        if self._changed:
            raise SavedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation",
                got=f"a saved tensor of {self._line.module or 'no module'} that was changed after it was saved",
                fix="change a copy, or run the forward and the change under saved.mutable()",
            )
        return data if self._codec is None else self._codec.decode(data, self._raw_bytes, self._dtype)

    def _check(self) -> None:
        """Note whether the user changed the bytes in place."""
        if self._alias is not None:
            known = ((self._alias, self._at_version), *self._watched)
            self._changed = self._changed or any(version_of(alias) != version for alias, version in known)

    # For an offloader's round

    def enter(self, number: int) -> None:
        """Become part of a round; the bytes stay on the device for now."""
        self.number = number
        self._line.stay(self.nbytes)

    def use(self) -> bool:
        """Count a use by the backward; whether it is the last one expected."""
        self._uses -= 1
        if self._uses > 0:
            return False
        self._uses = self._packs  # for a second backward through a graph that is retained
        return True

    def send(self, store: Store) -> bool:
        """Start the copy out; whether the store had room."""
        assert self.data is not None
        self.away = store.send(self.data, self._dtype.itemsize if self._codec is None else 1, self._lossless)
        self._line.stay(-self.nbytes)
        if self.away is None:
            self._line.no_room(self.nbytes)
            return False
        self._line.move(self.nbytes)
        return True

    def wait_out(self) -> None:
        """Make the computation wait for the copy out."""
        assert self.away is not None
        self._line.wait(self.away.out.join())

    def keep_until_copied(self) -> None:
        """Let the copy out go on after the bytes on the device are dropped."""
        assert self.away is not None
        assert self.data is not None
        self.away.out.let_go(self.data)

    def release(self) -> None:
        """Drop the bytes on the device; the store has them."""
        self._check()
        self.data, self._alias, self._watched = None, None, ()
        self._line.hold(-self.nbytes)

    def ask(self) -> None:
        """Start the copy back."""
        assert self.away is not None
        self.arrival = self.away.back()
        self._line.hold(self.nbytes)

    def join(self) -> Tensor:
        """The bytes that come back, for whatever is computed from now on."""
        assert self.arrival is not None
        data, wait = self.arrival.join()
        self._line.wait(wait)
        return data

    def taken(self) -> None:
        """The backward holds what came back; it is not needed again."""
        self.arrival = None
        self._line.hold(-self.nbytes)

    def free(self) -> None:
        """Nobody needs the bytes any more."""
        if self.data is not None:
            if self.away is not None:
                self.away.out.let_go(self.data)
            self.data, self._alias, self._watched = None, None, ()
            self._line.hold(-self.nbytes)
        if self.arrival is not None:
            self.arrival.drop()
            self.taken()
        if self.away is not None:
            self.away.free()
            self.away = None
