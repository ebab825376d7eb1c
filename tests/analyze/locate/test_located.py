"""Which fault is named first."""

from specscope.analyze.locate.located import Located, Operation, Proof, Stage, ranked


def fault(stage, name, proof, explained=5, spoiled=0):
    return Located(Operation(stage, name, name), name, explained=explained, spoiled=spoiled, differing=112, proof=proof)


def test_a_place_stands_before_rows_and_what_explains_the_most_before_what_explains_little():
    walked = fault(Stage.DRAFTER, "walked", Proof.PLACE, 2)
    above = fault(Stage.TARGET, "above", Proof.PLACE, 1)
    all_rows = fault(Stage.VERDICT, "all rows", Proof.ROWS, 112)
    spoils = fault(Stage.VERDICT, "spoils", Proof.ROWS, 112, spoiled=100)
    two = fault(Stage.SAMPLING, "two of two", Proof.ROWS, 2)
    summed = fault(Stage.SAMPLING, "summed", Proof.SUM, 5000)
    order = [item.operation.name for item in ranked([two, summed, spoils, all_rows, walked, above])]
    assert order == ["above", "walked", "all rows", "spoils", "two of two", "summed"]
