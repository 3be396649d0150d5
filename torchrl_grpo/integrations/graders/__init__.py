"""Graders of other projects' data and answers: tests of MBPP, HumanEval, APPS and LiveCodeBench
(``code``), IFEval's instructions, math-verify's expressions, a judge behind OpenAI's API, and a
reward model of Hugging Face.
"""
