"""Scripts that know nothing of this package, trained as a pipeline."""
from .refusal import Refusal, refuse_all
from .script_run import Options, PipelineJob

__all__ = ['Options', 'PipelineJob', 'Refusal', 'refuse_all']
