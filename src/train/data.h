// SPDX-License-Identifier: Apache-2.0
// What a model is trained on: a Task is a data set read from the files that its publishers distribute, as plain bytes
// and numbers; no torch here. A file that is missing or damaged is an Error{io or frame} that names the file, what was
// expected of it and how to get it.
//
//   fashion-mnist, mnist   idx files, gzip or plain
//   cifar10, cifar100      the binary version
//   ag-news                train.csv and test.csv: class, title, description; words by number: 0 padding, 1 unknown
//   text                   plain text for language models: one file, or a directory with train and test or valid
//                          files; characters or words by number: 0 unknown
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gradwire::train {

// Samples of one shape. Images are bytes, {channels, height, width}; text is token numbers, {length}. A sample has one
// label, or, where a language model is trained, one a token: the token that follows.
struct Samples {
  uint64_t count = 0;
  std::vector<int64_t> shape;
  std::vector<uint8_t> pixels;  // count x shape, for images
  std::vector<int32_t> tokens;  // count x shape, for text
  std::vector<int32_t> labels;  // count x labels_each
  uint64_t labels_each = 1;
};

struct Task {
  std::string name;
  Samples train, test;
  int64_t classes = 0;
  int64_t vocabulary = 0;              // text: token numbers are below it; 0: images
  std::vector<float> mean, deviation;  // images: per channel, of values in 0..1
  bool crops = false, flips = false;   // CIFAR's usual augmentation: crops of the padded image, mirrors
};

struct TaskOptions {
  std::string directory;   // empty: where Debian puts Fashion-MNIST; the other tasks need one; text: may be a file
  int64_t length = 0;      // tokens of a text sample; 0: the task's own default
  int64_t vocabulary = 0;  // ag-news, text by words: the most frequent words; 0: the task's own default
  bool words = false;      // text: tokens are words instead of characters
  uint64_t limit = 0;      // the first so many samples of train and of test; 0: all; the vocabulary is that of all
};

const std::vector<std::string>& task_names();
// Throws Error{usage} for an unknown task and an option that it does not take, Error{io} for a file that is not there,
// Error{frame} for one that is damaged.
Task load_task(const std::string& name, const TaskOptions& options = {});

// The order of an epoch: the samples 0 .. count-1 sorted by their keys, where, in arithmetic modulo 2^64,
//
//   key(sample) = mix64(mix64(seed + 0x9e3779b97f4a7c15) ^ mix64(epoch << 32 | sample))
//
// and mix64 is the finaliser of SplitMix64 (core/bits.h: shifts 30, 27, 31, two multiplications). No two keys of an
// epoch are equal, so any program that sorts finds the same order: with numpy and uint64 arrays,
// np.argsort(key(np.arange(count))).
std::vector<uint32_t> epoch_order(uint64_t count, uint64_t seed, uint64_t epoch);

// One sample's pixels as they enter a batch: where `augment` is set, a task that crops takes a random window of the
// image with four black pixels around it, and one that flips then mirrors it left to right in half of the cases. The
// random bits are a function of (seed, epoch, sample), r = mix64(key(sample) + 0x9e3779b97f4a7c15), so neither the
// number of workers nor a restart changes what a sample looks like: the window starts (r & 0xffffffff) * 9 >> 32 pixels
// down and (r >> 32 & 0x7fffffff) * 9 >> 31 to the right; r >> 63 mirrors.
void copy_pixels(const Task& task, const Samples& samples, uint64_t sample, bool augment, uint64_t seed, uint64_t epoch,
                 std::span<uint8_t> out);

}  // namespace gradwire::train
