"""What a rule of failure points to: the likely cause, in a sentence."""

from ddtree.invariants.conformance.decide import Condition, Rule

_OF_FACTOR = {
    (
        "branching",
        "the tree branches",
    ): "rows see siblings: a chain's causal mask stands for the tree's",
    ("branching", "the tree is a chain"): "a path for chains alone is wrong",
    ("padding", "num_nodes < q_len"): "padding rows count as nodes and are seen by real ones",
    ("padding", "num_nodes == q_len"): "the last node is taken for padding",
    (
        "position",
        "the request is not the first",
    ): "the offsets of later requests are wrong: look at what is cumulated",
    ("position", "the request is the first"): "the first request's offset is not 0",
    ("position", "the request is the last"): "the last request is left out or ends elsewhere",
    ("batch", "the batch has several requests"): "one request's numbers are used for all",
    ("page_size", "page_size > 1"): "slots are computed as if a page held one entry",
    ("page_size", "page_size == 1"): "slots are computed as if every page held several entries",
}
_OF_PATH = {
    "execution is eager": "the eager path alone has it: its twin was mended",
    "execution is not eager": "the path of fixed buffers alone has it: the eager one was mended",
    "execution is replay": "something of the captured call stays in the replay",
    "execution is not replay": "what is filled before each replay is right, what is built per call is not",
    "execution is fixed buffers": "the first fill of the buffers alone has it",
}


def cause_of(rule: Rule) -> str:
    """The likely cause; empty if a rule points to none."""
    if not rule.conditions:
        return "the mask is inverted, or not read at all"
    if rule.joined == "or":
        texts = {condition.text for condition in rule.conditions}
        if texts == {"the tree branches", "num_nodes < q_len"}:
            return "the mask is not read: rows see all that stands before them, and padding"
        return ""
    said = []
    for condition in rule.conditions:
        known = _OF_FACTOR.get((condition.factor, condition.text)) or _OF_PATH.get(condition.text)
        said.append(known or _of_number(condition))
    return "; ".join(text for text in said if text)


def _of_number(condition: Condition) -> str:
    number, relation = condition.number, condition.relation
    match condition.factor, relation:
        case "q_len", "!=":
            return f"a width of {number} is used where q_len belongs"
        case "q_len" | "num_nodes", ">":
            return f"something has room for {number} rows: a launch, a buffer or a word of bits"
        case "q_len" | "num_nodes", "<=":
            return "a path for few rows is wrong"
        case "prefix_len", ">":
            return (
                f"entries of a prefix behind the first {number} are read wrong"
                if number
                else ("prefix entries are read wrong")
            )
        case "prefix_len", "==":
            return f"a prefix of {number} is not provided for"
        case "prefix_len", "!=":
            return f"a prefix length of {number} is used where the call's belongs"
    return ""
