// Persistent threads that carry out one job at a time.
#pragma once

#include <stdint.h>

namespace forebay {

constexpr int kMaxThreads = 512;

// Part `part` of `num_parts` of a job.
using Part = void (*)(void *context, int part, int num_parts);

// The number of threads a job may use, the caller's included.
int num_threads();
int set_num_threads(int n);

// Run all parts, part 0 on the calling thread, and return when all are done. Jobs of several callers run one after
// the other. `num_parts` is at most num_threads(); when a thread cannot be started the caller does its part.
void run_parts(Part part, void *context, int num_parts);

}  // namespace forebay
