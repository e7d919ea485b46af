"""The GPU mover without its thread, for tests that must repeat themselves."""

from __future__ import annotations

from kvass.transfer.base import Done, Job
from kvass.transfer.device_mover import DeviceMover


class SteppedMover(DeviceMover):
    """``_turn`` is what the thread does once; ``close`` runs the rest of it."""

    def _start(self) -> None:
        if self._closed:
            super()._start()  # which raises

    def close(self) -> None:
        super().close()
        self._run()

    def settle(self) -> None:
        """Settle every job."""
        while not self.drain(0):
            self._turn()

    def move(self, job: Job) -> Done:
        """Carry out one job, and close."""
        self.submit(job)
        self.settle()
        self.close()
        (done,) = self.poll()
        return done
