"""The planted faults, one file a family."""

from tests.faults.fault import Fault
from tests.faults.planted import drafter_kv, drafts, features, kv, modules, rules, scheduling, trials

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for family in (drafts, features, drafter_kv, modules, trials, rules, kv, scheduling)
    for fault in family.FAULTS
}
