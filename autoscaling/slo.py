"""The objective by the name under which autoscaling knows it; edges count against it, too, so it stands in cluster."""

from manta.cluster.slo import Slo

__all__ = ["Slo"]
