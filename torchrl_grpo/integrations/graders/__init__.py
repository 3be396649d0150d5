"""Graders of other projects' data and answers: tests of MBPP, HumanEval, APPS and LiveCodeBench
(``code``), IFEval's instructions, math-verify's expressions, and a judge behind OpenAI's API.
"""
