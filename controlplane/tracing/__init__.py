"""OpenTelemetry spans: one trace for each update, over all processes, and one span for each call of Generate.

Off unless it is asked for, and then nothing is made and nothing imported. Every span is handed over when it is over,
from times that were measured anyway. See docs/tracing.md.

To be added here: ways of spans, never of decisions; no call may wait, fail or be refused because of a span.
"""

from controlplane.tracing.calls import UNTRACED as UNTRACED
from controlplane.tracing.calls import CallTrace as CallTrace
from controlplane.tracing.calls import caller_metadata as caller_metadata
from controlplane.tracing.calls import incoming as incoming
from controlplane.tracing.calls import trace_asked as trace_asked
from controlplane.tracing.calls import trace_call as trace_call
from controlplane.tracing.current import Tracer as Tracer
from controlplane.tracing.current import child as child
from controlplane.tracing.current import decided as decided
from controlplane.tracing.current import emit as emit
from controlplane.tracing.current import enabled as enabled
from controlplane.tracing.current import log_fields as log_fields
from controlplane.tracing.current import soon as soon
from controlplane.tracing.current import unix_ns as unix_ns
from controlplane.tracing.current import use as use
from controlplane.tracing.otlp import sending_spans as sending_spans
from controlplane.tracing.phases import Phase as Phase
from controlplane.tracing.phases import Phases as Phases
from controlplane.tracing.settings import BY_ENVIRONMENT as BY_ENVIRONMENT
from controlplane.tracing.settings import TracingSettings as TracingSettings
