"""What every runner without recurrent states answers, for runners without a model."""


class StatelessRunner:
    """The part of a runner that is about recurrent states, of which there are none."""

    def fork(self, sequence_id: int, twin_id: int) -> None:
        raise AssertionError("this model has no recurrent states")

    def holds(self, sequence_id: int, position: int) -> bool:
        return False

    def save(self, sequence_id: int, position: int, slot: int) -> None:
        raise AssertionError("this model has no recurrent states")

    def resume(self, sequence_id: int, position: int, slot: int) -> None:
        raise AssertionError("this model has no recurrent states")

    def probe(self) -> None:
        pass
