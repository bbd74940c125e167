"""Room for the tokens that a cache decodes, made between two steps: buffers grow and periodic work runs outside of any graph."""

from .errors import UnsupportedOperationError
from .layers.base import SparseLayer
from .layers.session import Session

_NEVER_FULL = 2**62


class StepRoom:
    """The part of a cache that keeps one-token steps free of allocations.

    A step that is compiled or replayed cannot ask how full its buffers are. So the number of steps that surely fit is counted
    down on the host, and the device is asked again only when it reaches 0.
    """

    sparse_layers: list[SparseLayer]
    session: Session

    def begin_with_room(self, reserve: int, restart: int | None) -> None:
        """Nothing is known yet; the first growth is by `reserve` tokens. `restart`: see `rotary.restart_length`."""
        self._restart = restart
        self._room: int | None = None  # one-token steps that surely fit; None: ask
        self._moves = 0
        self._step_prepared = False
        self._growth = self._reserve = reserve

    def forget_room(self) -> None:
        """What is held has changed in another way than by one-token steps."""
        self._room, self._step_prepared = None, False

    def prepare_decode(self) -> bool:
        """Makes room for a one-token step, as `get_mask_sizes` does inside `generate()`; for loops that replay a graph.

        Returns:
            True when buffers moved, so that a captured graph must be recorded again.
        """
        moves, self._step_prepared = self._moves, False
        self._prepare_step(1)
        return self._moves > moves

    def mark_prepared(self) -> None:
        """The next forward needs no room made: it is being recorded, and may not wait for the device."""
        self._step_prepared = True

    def _prepare_step(self, query_length: int) -> None:
        """Makes sure that a one-token step finds room, without asking the device more than once per `reserve` tokens."""
        if self._step_prepared:
            return
        self._step_prepared = True
        if query_length != 1:
            self._room = None  # the coming forward changes it
            self._check_restart(query_length)
            return
        if self._room is None or self._room < 1:
            self._maintain()
            self._room = self._measure_room()
        if self._room is None:
            return
        if self._room < 1:
            self._check_restart(1)
            for layer in self.sparse_layers:
                room = layer.open_room()
                if room is not None and room < 1:
                    layer.grow(self._growth)
            self._growth = min(2 * self._growth, max(self._reserve, self.session.seen()))
            self._moves += 1
            self._room = self._measure_room()
        self._room -= 1

    def _maintain(self) -> None:
        """Runs the periodic work that layers do between two steps, where it is due."""
        for layer in self.sparse_layers:
            if layer.is_initialized and layer.due_in() == 0:
                self._moves += layer.maintain()

    def _measure_room(self) -> int | None:
        """One-token steps that fit before a layer must grow or be maintained; None while some layer has not seen a prompt."""
        if not all(layer.is_initialized for layer in self.sparse_layers):
            return None
        rooms = [room for layer in self.sparse_layers for room in (layer.open_room(), layer.due_in())]
        if self._restart is not None and self.session.seen() <= self._restart:
            rooms.append(self._restart - self.session.seen())
        return min((room for room in rooms if room is not None), default=_NEVER_FULL)

    def _check_restart(self, tokens: int) -> None:
        """Refuses a forward after which the keys that are held would have the wrong frequencies."""
        if self._restart is None or self.session.batch is None:
            return
        if self.session.seen() <= self._restart < self.session.seen() + tokens:
            raise UnsupportedOperationError(
                f"beyond {self._restart} tokens this model computes all its keys again with other rotary frequencies (longrope), and this "
                f"cache holds {self.session.seen()} tokens of before. Stop there, or start with a longer prompt; or use Transformers' own "
                "cache."
            )
