"""Which models are loaded and unloaded, and in which order."""

from __future__ import annotations

from gateway_svc.several.plan import ListedModel, Orders, plan
from gateway_svc.several.wire import Bounds, LoadState, ModelStatus

GIB = 2**30
TWO_GIB = Bounds(memory_bytes=2 * GIB)


def model(name: str, state: LoadState = LoadState.LOADED, memory: float = 1.0, **options) -> ListedModel:
    return ListedModel(ModelStatus(name, f"/m/{name}", state, memory_bytes=int(memory * GIB)), **options)


def wanted(name: str, at: float = 0.0, **options) -> ListedModel:
    return model(name, LoadState.UNLOADED, num_waiting=1, wanted_at=at, **options)


def names(orders: Orders) -> tuple[list[str], list[str], list[str]]:
    return tuple([each.status.name for each in part] for part in (orders.load, orders.unload, orders.leave))


def test_what_fits_is_loaded_at_once():
    assert names(plan([model("a"), wanted("b")], TWO_GIB, 1)) == (["b"], [], [])
    assert names(plan([wanted("a"), wanted("b")], TWO_GIB, 1)) == (["a", "b"], [], [])
    assert names(plan([wanted("a"), wanted("b")], Bounds(), 1)) == (["a", "b"], [], [])


def test_a_model_that_nobody_asks_for_is_left_alone():
    assert names(plan([model("a", LoadState.UNLOADED), model("b")], TWO_GIB, 1)) == ([], [], [])


def test_the_one_used_longest_ago_makes_room():
    models = [model("a", used_at=5), model("b", used_at=3), wanted("c", 9)]
    assert names(plan(models, TWO_GIB, 10)) == ([], ["b"], [])


def test_as_many_leave_as_are_needed():
    models = [model("a", used_at=5), model("b", used_at=3), wanted("c", 9, memory=1.5)]
    assert names(plan(models, TWO_GIB, 10)) == ([], ["b", "a"], [])


def test_one_that_leaves_already_is_waited_for():
    models = [model("a", used_at=5), model("b", LoadState.UNLOADING), wanted("c", 9)]
    assert names(plan(models, TWO_GIB, 10)) == ([], [], [])


def test_none_leaves_with_requests_in_it():
    for busy in ({"num_running": 1}, {"num_in_sessions": 1}, {"num_waiting": 1}):
        models = [model("a", used_at=5), model("b", used_at=3, **busy), wanted("c", 9)]
        assert names(plan(models, TWO_GIB, 10)) == ([], ["a"], []), busy


def test_where_all_are_busy_one_takes_no_more_requests_after_a_while():
    models = [model("a", used_at=5, num_running=1), model("b", used_at=3, num_running=2), wanted("c", 9)]
    assert names(plan(models, TWO_GIB, 10)) == ([], [], [])
    assert names(plan(models, TWO_GIB, 12)) == ([], [], ["b"])
    models[1].is_leaving = True
    assert names(plan(models, TWO_GIB, 13)) == ([], [], [])
    models[1].num_running, models[1].num_waiting = 0, 3
    assert names(plan(models, TWO_GIB, 14)) == ([], ["b"], [])


def test_one_that_was_just_loaded_stays_a_while():
    models = [model("a", num_running=1, loaded_at=9), wanted("c", 1)]
    assert names(plan(models, Bounds(max_loaded=1), 10)) == ([], [], [])
    assert names(plan(models, Bounds(max_loaded=1), 14)) == ([], [], ["a"])


def test_none_overtakes_one_that_waits_for_a_place():
    models = [model("a", num_running=1), wanted("big", 1, memory=1.5), wanted("small", 2, memory=0.5)]
    assert names(plan(models, TWO_GIB, 2)) == ([], [], [])


def test_what_never_fits_is_loaded_when_nothing_else_is_there():
    assert names(plan([wanted("big", memory=3)], TWO_GIB, 1)) == (["big"], [], [])
    assert names(plan([model("a"), wanted("big", memory=3)], TWO_GIB, 1)) == ([], ["a"], [])


def test_one_without_requests_for_long_is_unloaded():
    bounds = Bounds(unload_after_s=60)
    assert names(plan([model("a", used_at=1), model("b", used_at=1, num_running=1)], bounds, 61)) == ([], ["a"], [])
    assert names(plan([model("a", used_at=1)], bounds, 60)) == ([], [], [])


def test_the_number_of_models_is_a_bound_too():
    models = [model("a", used_at=2, memory=0), model("b", used_at=1, memory=0), wanted("c", memory=0)]
    assert names(plan(models, Bounds(max_loaded=2), 10)) == ([], ["b"], [])
