"""What an engine says of the end of a request arrives as it was said."""

from foreword.engine.request import Event, Logprob, Request, Running
from foreword.errors import NumericsError
from foreword.serve.messages import LENGTH, EngineLoad, StepReport, frame, from_engine, progress_of


def test_the_end_of_a_request_crosses_whole() -> None:
    entry = Logprob(4, -0.5, ((4, -0.5),), "", ("",))
    run = Running(Request((1, 2)), finish_reason="abort", accepted=[2, 0], drafted=[3, 0], draft_was_nan=True)
    run.error, run.prompt_logprobs = NumericsError("the target answered NaN"), [entry]
    sent = StepReport([progress_of(7, Event(run, [5], "", [entry]))], EngineLoad(1, 2, 3), 0.25)
    packed = frame(sent)
    assert LENGTH.unpack(packed[: LENGTH.size]) == (len(packed) - LENGTH.size,)
    found = from_engine(packed[LENGTH.size :])
    assert found == sent
    (progress,) = found.progress
    assert (progress.number, progress.tokens, progress.accepted, progress.drafted) == (7, [5], [0], [0])
    ended = progress.ended
    assert ended is not None and ended.draft_was_nan and ended.prompt_logprobs == [entry]
    assert ended.finish is not None and ended.finish.reason == "abort"
    assert ended.failure is not None and isinstance(ended.failure.error(), NumericsError)
