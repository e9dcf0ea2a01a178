"""The shape contract of Kimi Delta Attention, for any array library: standard library only."""

from kda_contracts.arrays import ArrayFacts as ArrayFacts
from kda_contracts.arrays import facts as facts
from kda_contracts.axes import AXES as AXES
from kda_contracts.checkpoint import CheckpointReport as CheckpointReport
from kda_contracts.checkpoint import Fault as Fault
from kda_contracts.checkpoint import LayerReport as LayerReport
from kda_contracts.checkpoint import check_checkpoint as check_checkpoint
from kda_contracts.checkpoint import find_tensors as find_tensors
from kda_contracts.judge import ContractError as ContractError
from kda_contracts.judge import Sizes as Sizes
from kda_contracts.judge import Violation as Violation
from kda_contracts.judge import check as check
from kda_contracts.kda import CHECKPOINT as CHECKPOINT
from kda_contracts.kda import COMMIT as COMMIT
from kda_contracts.kda import KDA_UPDATE as KDA_UPDATE
from kda_contracts.kda import PACKED_DECODE as PACKED_DECODE
from kda_contracts.kda import RECURRENT_KDA as RECURRENT_KDA
from kda_contracts.normalize import normalize_a as normalize_a
from kda_contracts.normalize import normalize_A_log as normalize_A_log
from kda_contracts.normalize import normalize_dt_bias as normalize_dt_bias
from kda_contracts.safetensors_header import BadFileError as BadFileError
from kda_contracts.spec import Contract as Contract
from kda_contracts.spec import Layout as Layout
from kda_contracts.spec import Operand as Operand
from kda_contracts.spec import Option as Option
from kda_contracts.spec import Tensor as Tensor
