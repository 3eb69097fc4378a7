// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint.h"

#include <caffe2/serialize/inline_container.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <torch/autograd.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fstream>

#include "core/file.h"
#include "gradwire/error.h"

namespace gradwire::train {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& path, const char* what) { throw_errno(path, what, "checkpoint"); }

struct CheckpointFile {
  explicit CheckpointFile(int d) : descriptor(d) {}
  ~CheckpointFile() {
    if (descriptor >= 0) ::close(descriptor);
  }
  int descriptor;
};

// A new file, on disk when this returns. The folder that it is in gets its name only when all of them are there.
void write(const std::string& path, std::string_view bytes) {
  const CheckpointFile file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file.descriptor < 0) fail(path, "create it");
  while (!bytes.empty()) {
    const ssize_t written = ::write(file.descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path, "write it");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  if (::fsync(file.descriptor) != 0) fail(path, "bring it to disk");
}

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, "read it");
  std::string bytes(static_cast<size_t>(fs::file_size(path)), '\0');
  if (!file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) fail(path, "read it");
  return bytes;
}

std::string hash_of(std::string_view bytes) { return fmt::format("{:016x}", XXH3_64bits(bytes.data(), bytes.size())); }

nlohmann::json parse(const std::string& path, const std::string& text) {
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorKind::frame, fmt::format("{}: damaged: {}", path, error.what()), "checkpoint");
  }
}

// The bytes of a file of a checkpoint, once they are known to be those that were written.
std::string read_checked(const std::string& folder, const std::string& name) {
  const std::string manifest_path = folder + "/manifest.json", path = folder + "/" + name;
  const nlohmann::json manifest = parse(manifest_path, read(manifest_path));
  if (!manifest.contains(name))
    throw Error(ErrorKind::frame, fmt::format("{}: is not in the checkpoint's manifest", path), "checkpoint");
  std::string bytes = read(path);
  const nlohmann::json& entry = manifest[name];
  if (bytes.size() != entry.value("bytes", uint64_t{0}) || hash_of(bytes) != entry.value("hash", ""))
    throw Error(ErrorKind::frame,
                fmt::format("{}: damaged: {} bytes with hash {}, the manifest says {}", path, bytes.size(),
                            hash_of(bytes), entry.dump()),
                "checkpoint");
  return bytes;
}

// A dictionary of tensors as Python's torch.save writes it. torch::pickle_save would also note the dictionary's C++
// type, which torch.load refuses unless it is told to trust the file.
std::string pack(const TensorMap& tensors) {
  c10::impl::GenericDict dictionary(c10::StringType::get(), c10::TensorType::get());
  for (const auto& [name, tensor] : tensors) dictionary.insert(name, tensor.detach().to(torch::kCPU).contiguous());
  std::string pickled, bytes;
  torch::jit::Pickler pickler([&](const char* data, size_t size) { pickled.append(data, size); }, nullptr, nullptr,
                              nullptr, nullptr, false);
  pickler.protocol();
  pickler.pushIValue(dictionary);
  pickler.stop();
  caffe2::serialize::PyTorchStreamWriter zip([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  zip.writeRecord("data.pkl", pickled.data(), pickled.size());
  size_t number = 0;
  for (const at::Tensor& tensor : pickler.tensorData()) {
    const auto data = torch::jit::getWriteableTensorData(tensor);
    zip.writeRecord(fmt::format("data/{}", number++), data.data(), data.sizeInBytes());
  }
  zip.writeEndOfFile();
  return bytes;
}

void unpack(const std::string& path, const std::string& bytes, const TensorMap& tensors) {
  const auto stored = torch::jit::pickle_load({bytes.begin(), bytes.end()}).toGenericDict();
  torch::NoGradGuard no_grad;
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::frame, fmt::format("{}: {}: the checkpoint is of another model", path, why), "checkpoint");
  };
  if (stored.size() != tensors.size())
    refuse(fmt::format("has {} tensors, the model needs {}", stored.size(), tensors.size()));
  for (const auto& [name, tensor] : tensors) {
    const auto found = stored.find(name);
    if (found == stored.end()) refuse(fmt::format("has no tensor '{}'", name));
    const torch::Tensor value = found->value().toTensor();
    if (value.sizes() != tensor.sizes() || value.scalar_type() != tensor.scalar_type())
      refuse(fmt::format("tensor '{}' has another shape or type", name));
    torch::Tensor(tensor).copy_(value);
  }
}

// The step that a directory holds, by its name; whatever else lies beside the checkpoints is not ours.
std::optional<uint64_t> step_of(const fs::path& path) {
  constexpr std::string_view kPrefix = "step-";
  const std::string name = path.filename().string();
  uint64_t step = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
  return error == std::errc() && end == name.data() + name.size() ? std::optional(step) : std::nullopt;
}

std::string own_file(int rank) { return fmt::format("rank-{}.pt", rank); }
std::string residuals_file(int rank, size_t bucket) { return fmt::format("rank-{}-bucket-{}.residuals", rank, bucket); }
constexpr const char* kWeights = "weights.pt";
constexpr const char* kState = "state.json";
constexpr const char* kManifest = "manifest.json";

// What is wrong with a checkpoint, or nothing.
std::string damage_of(const std::string& folder) {
  try {
    const std::string path = folder + "/" + kManifest;
    const nlohmann::json manifest = parse(path, read(path));
    if (!manifest.is_object()) return fmt::format("{}: damaged: it is not a list of files", path);
    for (const char* name : {kState, kWeights}) read_checked(folder, name);
    for (const auto& [name, entry] : manifest.items()) read_checked(folder, name);
    return {};
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {  // of the JSON library, or of the file system
    return fmt::format("{}: damaged: {}", folder, error.what());
  }
}

}  // namespace

void save_tensors(const std::string& path, const TensorMap& tensors) {
  const std::string bytes = pack(tensors);
  replace_file(path, std::as_bytes(std::span(bytes)));
}

void expect_writable(const std::string& path) {
  const FileReplacement unfinished(path);  // which refuses what save_tensors would, and leaves nothing behind
}

Checkpoints::Checkpoints(std::string directory, Control& control)
    : directory_(std::move(directory)), control_(control) {
  control_.together([&] {
    if (control_.rank() != 0) return;
    std::error_code error;
    fs::create_directories(directory_, error);
    if (error)
      throw Error(ErrorKind::io, fmt::format("{}: cannot be made: {}", directory_, error.message()), "checkpoint");
    for (const auto& entry : fs::directory_iterator(directory_))  // what a killed run left
      if (entry.path().filename().string().starts_with("unfinished-")) fs::remove_all(entry.path());
  });
}

std::string Checkpoints::path_of(uint64_t step) const { return fmt::format("{}/step-{:09}", directory_, step); }

std::vector<uint64_t> Checkpoints::steps() const {
  std::vector<uint64_t> found;
  for (const auto& entry : fs::directory_iterator(directory_))
    if (const auto step = step_of(entry.path())) found.push_back(*step);
  std::sort(found.begin(), found.end());
  return found;
}

std::optional<uint64_t> Checkpoints::newest() const {
  const std::vector<uint64_t> found = steps();
  return found.empty() ? std::nullopt : std::optional(found.back());
}

// Rank 0 looks and tells the others, so that all ranks go on in the same way.
std::string Checkpoints::damage(uint64_t step) {
  char text[1024] = {};
  control_.together([&] {
    if (control_.rank() == 0) damage_of(path_of(step)).copy(text, sizeof text - 1);
  });
  control_.broadcast(std::as_writable_bytes(std::span(text)));
  return text;
}

std::optional<uint64_t> Checkpoints::whole_before(uint64_t step) {
  struct Found {
    bool any = false;
    uint64_t step = 0;
  } found;
  control_.together([&] {
    if (control_.rank() != 0) return;
    for (const uint64_t other : steps())
      if (other < step && damage_of(path_of(other)).empty()) found = {.any = true, .step = other};
  });
  control_.broadcast(std::as_writable_bytes(std::span(&found, 1)));
  return found.any ? std::optional(found.step) : std::nullopt;
}

std::string Checkpoints::set_aside(uint64_t step) {
  std::string to = path_of(step) + ".damaged";
  control_.together([&] {
    if (control_.rank() != 0) return;
    for (int number = 2; fs::exists(to); ++number) to = fmt::format("{}.damaged-{}", path_of(step), number);
    if (std::rename(path_of(step).c_str(), to.c_str()) != 0) fail(path_of(step), "set it aside");
    flush_folder(directory_);
  });
  return to;
}

void Checkpoints::save(uint64_t step, const nlohmann::json& state, const TensorMap& weights, const TensorMap& own,
                       Descent& descent) {
  const int rank = control_.rank();
  const std::string folder = fmt::format("{}/unfinished-{}", directory_, step), final = path_of(step);
  try {
    control_.together([&] {
      if (rank != 0) return;
      fs::remove_all(folder);
      if (std::error_code error; !fs::create_directory(folder, error))
        throw Error(ErrorKind::io, fmt::format("{}: cannot be made: {}", folder, error.message()), "checkpoint");
    });
    control_.together([&] {
      write(folder + "/" + own_file(rank), pack(own));
      size_t bucket = 0;
      for (const ErrorFeedback* one : descent.residuals()) one->save(folder + "/" + residuals_file(rank, bucket++));
      if (rank != 0) return;
      write(folder + "/" + kWeights, pack(weights));
      write(folder + "/" + kState, state.dump(1));
    });
    control_.together([&] {
      if (rank != 0) return;
      nlohmann::json manifest;
      for (const auto& entry : fs::directory_iterator(folder)) {
        const std::string bytes = read(entry.path().string());
        manifest[entry.path().filename().string()] = {{"bytes", bytes.size()}, {"hash", hash_of(bytes)}};
      }
      for (int p = 0; p < control_.size(); ++p)
        if (!manifest.contains(own_file(p)))
          throw Error(ErrorKind::io,
                      fmt::format("{}: {} is not there: do all workers see one file system?", folder, own_file(p)),
                      "checkpoint");
      write(folder + "/" + kManifest, manifest.dump(1));
      flush_folder(folder);
      fs::remove_all(final);
      if (std::rename(folder.c_str(), final.c_str()) != 0) fail(final, "rename to it");
      flush_folder(directory_);
      prune();
    });
  } catch (const Error& error) {
    if (std::error_code ignored; rank == 0) fs::remove_all(folder, ignored);
    const std::optional<uint64_t> last = newest();
    throw Error(
        error.kind(),
        fmt::format("{} ({})", error.what(),
                    last ? fmt::format("the checkpoint of step {} is whole", *last) : "there is no older checkpoint"),
        "checkpoint", error.rank());
  }
}

void Checkpoints::prune() const {
  const std::vector<uint64_t> found = steps();
  for (size_t i = 0; i + 2 < found.size(); ++i) fs::remove_all(path_of(found[i]));
}

nlohmann::json Checkpoints::state(uint64_t step) const {
  return parse(path_of(step) + "/" + kState, read_checked(path_of(step), kState));
}

void Checkpoints::load(uint64_t step, const TensorMap& weights, const TensorMap& own, Descent& descent) {
  const std::string folder = path_of(step), file = own_file(control_.rank());
  control_.together([&] {
    unpack(folder + "/" + kWeights, read_checked(folder, kWeights), weights);
    unpack(folder + "/" + file, read_checked(folder, file), own);
    size_t bucket = 0;
    for (ErrorFeedback* one : descent.residuals()) {
      const std::string name = residuals_file(control_.rank(), bucket++);
      read_checked(folder, name);
      *one = ErrorFeedback::load(folder + "/" + name, one->device());
    }
  });
}

}  // namespace gradwire::train
