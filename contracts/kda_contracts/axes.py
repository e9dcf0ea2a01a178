"""The axis legend: one letter, one meaning, everywhere in code, docstrings, errors and tests."""

AXES = {
    "B": "rows of the decode batch, padded ones included; 1 if sequences lie end to end (varlen)",
    "T": "tokens per row (varlen: of all sequences together)",
    "N": "sequences",
    "S": "slots of the state pool",
    "H": "query/key heads; value head h reads key head h // (HV // H)",
    "HV": "value heads, a multiple of H",
    "K": "head dimension of q and k",
    "V": "head dimension of v",
    "W": "width of the short convolution",
    "C": "channels of the short convolution, 2*H*K+HV*V of a layer's",
    "D": "hidden size of the model",
    "R": "rank of the forget gate's two projections",
    "L": "columns of a table of slots, one for each token of the longest draft",
    "M": "checkpoints of a sequence: states kept on the way",
}
