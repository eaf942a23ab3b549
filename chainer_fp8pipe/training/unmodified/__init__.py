"""Scripts that know nothing of this package, trained as a pipeline."""
from .job import Options, PipelineJob
from .refusal import Refusal, refuse_all

__all__ = ['Options', 'PipelineJob', 'Refusal', 'refuse_all']
