"""The number that a rule of failure points to, where all other numbers were tried beside it."""

from ddtree.invariants.conformance.decide import Rule


def cause_of(rule: Rule) -> str:
    """The likely cause; empty if a rule points to none.

    A rule says where a backend fails, seldom why. One that spares a single width between others that fail
    does: nothing but that width, from another source, is right there by itself.
    """
    if rule.joined == "or":
        return ""
    for condition in rule.conditions:
        if (condition.factor, condition.relation) == ("q_len", "!="):
            return f"likely a width of {condition.number} is used where q_len belongs"
        if (condition.factor, condition.relation) == ("prefix_len", "!="):
            return f"likely a prefix length of {condition.number} is used where the call's belongs"
    return ""
