from engine_sample_plugin.attention import SampleAttention
from engine_sample_plugin.policy import ShortestFirst

from engine.testing.attention import AttentionConformance
from engine.testing.schedulers import PolicyConformance


class TestSampleAttention(AttentionConformance):
    backend = SampleAttention


class TestShortestFirst(PolicyConformance):
    policy = ShortestFirst
