"""The planted faults, one file a family."""

from tests.faults.fault import Fault
from tests.faults.planted import drafter_kv, drafts, features, kv, rows, rules, sampler, scheduling, trials

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for family in (drafts, features, drafter_kv, sampler, trials, rules, kv, rows, scheduling)
    for fault in family.FAULTS
}
