"""Exit codes: what is wrong beats what could not be judged, and that beats what is right."""

from specscope.analyze.findings import Exit


def test_wrong_beats_unjudged_beats_right():
    assert Exit.of(wrong=True, unjudged=True) is Exit.of(wrong=True, unjudged=False) is Exit.INCONSISTENT == 1
    assert Exit.of(wrong=False, unjudged=True) is Exit.NOT_JUDGED == 2
    assert Exit.of(wrong=False, unjudged=False) is Exit.CONSISTENT == 0
