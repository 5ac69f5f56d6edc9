from tests.faults import X


def test_x():
    assert X == 1
