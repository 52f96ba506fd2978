"""Helpers of the Inference Acceleration Cookbook: they measure, compare, draw and build baselines."""
