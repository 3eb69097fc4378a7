// SPDX-License-Identifier: Apache-2.0
// `gradwire compare`: the same training with several codecs and seeds. Runs are paired: a seed means the same weights,
// samples and order for every codec. Each run leaves a record in DIR/runs; one that is finished is not repeated, one
// that was stopped goes on. The report is written anew after every run, so that there is always one to look at.
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <ctime>
#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include "cli/command.h"
#include "cli/files.h"
#include "cli/options.h"
#include "cli/version.h"
#include "collective/factor_plan.h"
#include "gradwire/error.h"
#include "gradwire/rules.h"
#include "gradwire/version.h"
#include "report/report.h"
#include "report/report_run.h"
#include "train/console_reporter.h"
#include "train/run.h"
#include "train/training.h"

namespace gradwire::app {
namespace {

namespace fs = std::filesystem;

struct CompareOptions {
  TrainingOptions training;
  std::vector<std::string> codecs{"fp32",        "qsgd:bits=4",      "optquant:bits=3",
                                  "casq:bits=2", "dqsgd:budget=4.5", "fft:theta=0.85"};
  std::vector<std::string> collectives{"scatter"};
  int seeds = 1;
  std::string out;
  bool plots = false;
};

// A folder's name that people can read and that differs where settings do.
std::string folder_of(const train::Settings& settings) {
  std::string name = fmt::format("{}-{}-{}-{}-seed{}", settings.task, settings.model, settings.codec,
                                 settings.collective, settings.seed);
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '-' && c != '.' && c != '=') c = '_';
  const std::string all = nlohmann::json(settings).dump();
  return fmt::format("{}-{:08x}", name.substr(0, 120), static_cast<uint32_t>(XXH3_64bits(all.data(), all.size())));
}

std::vector<train::Settings> runs_of(const CompareOptions& options) {
  std::vector<train::Settings> list;
  for (int seed = 0; seed < options.seeds; ++seed)  // seeds outside: what was stopped early is paired all the same
    for (const std::string& collective : options.collectives)
      for (const std::string& codec : options.codecs) {
        train::Settings settings = options.training.settings;
        settings.codec = codec;
        settings.collective = collective;
        if (!settings.keeps_residuals()) settings.decay = 1;  // of the others
        settings.seed += static_cast<uint64_t>(seed);
        settings.check();
        list.push_back(settings);
      }
  return list;
}

std::string folder_again(std::string folder) {
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  return folder + "-again";
}

// A record that is damaged or of other settings is as good as none: the run is done again.
std::optional<nlohmann::json> finished_run(const std::string& path, const train::Settings& settings) {
  if (!fs::exists(path)) return std::nullopt;
  const std::vector<std::byte> bytes = read_file(path);
  const char* text = reinterpret_cast<const char*>(bytes.data());
  nlohmann::json record = nlohmann::json::parse(text, text + bytes.size(), nullptr, false);
  if (!record.is_object() || !record.contains("settings") || record["settings"] != nlohmann::json(settings))
    return std::nullopt;
  try {
    if (!parse_run(record).finished) return std::nullopt;
  } catch (const Error&) {
    return std::nullopt;
  }
  return record;
}

// Twice the same would be noticed by the report, after the training.
void expect_different(const CompareOptions& options) {
  std::map<std::string, std::string> codecs;
  for (const std::string& codec : options.codecs) {
    const auto [known, added] = codecs.emplace(canonical_rules(codec), codec);
    if (!added)
      throw Error(ErrorKind::usage,
                  fmt::format("codec is '{}' and '{}', which are the same; give each once", known->second, codec),
                  "codec");
  }
  if (std::set(options.collectives.begin(), options.collectives.end()).size() < options.collectives.size())
    throw Error(ErrorKind::usage, fmt::format("collective is '{}' twice; give each once", options.collectives.front()),
                "collective");
}

// Which program made a record, when and where, and how it is made again.
void note_origin(nlohmann::json& record, std::time_t begun, const std::string& command) {
  char host[256] = {};
  record["gradwire"] = std::string(kVersionString);
  if (!commit_text().empty()) record["commit"] = commit_text();
  record["date"] = fmt::format("{:%FT%TZ}", fmt::gmtime(begun));
  if (::gethostname(host, sizeof host - 1) == 0 && host[0] != '\0') record["host"] = host;
  record["command"] = command;
}

// The same command with another folder for its output: in the same folder it would find every run finished. The
// launcher of MPI processes is not part of a process's own words.
std::string repeating_command(const CompareOptions& options) {
  std::vector<std::string> words = command_words();
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--out" && i + 1 < words.size()) words[i + 1] = folder_again(options.out);
    if (words[i].starts_with("--out=")) words[i] = "--out=" + folder_again(options.out);
  }
  if (options.training.engine == "mpi")
    words.insert(words.begin(), {"mpirun", "-n", std::to_string(options.training.settings.workers)});
  return quoted_line(words);
}

void make_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw Error(ErrorKind::io, fmt::format("{}: cannot be made: {}", folder, error.message()), "out");
}

// Said after the report is written: the runs that did not fail are worth reading.
void expect_no_failure(const std::vector<nlohmann::json>& records) {
  std::vector<std::string> failed;
  for (const nlohmann::json& record : records)
    if (record.value("failed", false))
      failed.push_back(fmt::format("{}, seed {}: {}", record["codec"].get<std::string>(),
                                   record["seed"].get<uint64_t>(), failure_of(record)));
  if (!failed.empty())
    throw TrainingFailed(
        fmt::format("{} of {} trainings failed: {}", failed.size(), records.size(), fmt::join(failed, "; ")));
}

void compare(const CompareOptions& options, Engine* engine) {
  const std::atomic<bool>& stop = catch_interrupts();
  const bool leads = !engine || engine->rank() == 0;
  const std::vector<train::Settings> list = runs_of(options);
  expect_different(options);
  const train::Task task = train::load_task(list[0].task, list[0].task_options(options.training.places.data));
  std::vector<nlohmann::json> records;
  bool stopped = false;
  for (size_t i = 0; i < list.size() && !stopped; ++i) {
    const train::Settings& settings = list[i];
    const std::string folder = options.out + "/runs/" + folder_of(settings), path = folder + "/run.json";
    std::optional<nlohmann::json> done;
    if (leads) done = finished_run(path, settings);
    auto known = static_cast<std::byte>(done.has_value());
    if (engine) engine->broadcast({&known, 1}, 0).wait();
    if (known == std::byte{1}) {
      if (leads) records.push_back(*done);
      if (leads && !options.training.json)
        print(fmt::format("run {} of {}: {}, seed {}: finished before\n", i + 1, list.size(), settings.codec,
                          settings.seed));
      continue;
    }
    train::RunPlaces places = options.training.places;
    places.checkpoint = folder + "/checkpoint";
    places.resume_previous = true;
    if (leads) make_folder(folder);
    ConsoleReporter reporter(options.training.json);
    reporter.prefix(fmt::format("run {}/{}: ", i + 1, list.size()));
    if (leads && !options.training.json)
      print(fmt::format("{}run {} of {}, seed {}: ", i > 0 ? "\n" : "", i + 1, list.size(), settings.seed));
    train::Listener listener;
    if (leads) listener = [&](const nlohmann::json& event) { reporter.listen(event); };
    const std::time_t begun = std::time(nullptr);
    nlohmann::json record = train::run({task, settings, places, listener, stop}, engine);
    auto finished = static_cast<std::byte>(leads && record["finished"].get<bool>());
    if (engine) engine->broadcast({&finished, 1}, 0).wait();
    stopped = finished == std::byte{0};
    if (!leads) continue;
    note_origin(record, begun, repeating_command(options));
    records.push_back(record);
    write_file(path, record.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    if (!stopped) fs::remove_all(places.checkpoint);
    if (!record["epochs"].empty()) write_report(options.out, records, false);
  }
  if (!leads) return;
  std::erase_if(records, [](const nlohmann::json& record) { return record["epochs"].empty(); });
  if (!records.empty()) {
    const std::vector<std::string> files = write_report(options.out, records, options.plots);
    if (!options.training.json)
      print(fmt::format("\n{}\nwritten: {}/{}\n", report_table(records), options.out,
                        fmt::join(files, ", " + options.out + "/")));
  }
  expect_no_failure(records);
  if (!stopped) return;
  if (!options.training.json) print("stopped and saved; the same command goes on\n");
  throw Interrupted{};
}

}  // namespace

void add_compare(CLI::App& app, Action& action) {
  CLI::App* command =
      app.add_subcommand("compare", "Repeat a training with several codecs and seeds and write a report");
  auto options = std::make_shared<CompareOptions>();
  command
      ->add_option("--out", options->out,
                   "Directory for the runs, results.csv and report.html; runs that are finished there are not repeated")
      ->type_name("DIR")
      ->required();
  add_codec(*command, options->codecs, "Codec; may be given several times");
  command->add_option("--collective", options->collectives, "gather or scatter; may be given twice, to compare both")
      ->type_name("gather|scatter")
      ->allow_extra_args(false)
      ->check(CLI::IsMember({"gather", "scatter"}))
      ->capture_default_str();
  add_whole(*command, "--seeds", options->seeds, 1, 1000, "Number of seeds, counted from --seed");
  command
      ->add_option_function<std::string>(
          "--plot", [options](const std::string&) { options->plots = true; },
          "Also write plots for papers (this needs gnuplot)")
      ->type_name("png")
      ->check(CLI::IsMember({"png"}));
  add_training(*command, options->training);
  command->footer(
      "Examples:\n"
      "  gradwire compare --codec fp32 --codec qsgd:bits=4 --codec optquant:bits=3 --epochs 2 --out report\n"
      "  gradwire compare --task cifar10 --data DIR --model resnet20 --workers 8 --device cuda --seeds 3 --out report");
  command->callback([&action, options] {
    action = [options] {
      with_engine(options->training, [&](Engine* engine) {
        if (engine) options->training.settings.workers = engine->size();
        fill_in(options->training);
        compare(*options, engine);
      });
    };
  });
}

}  // namespace gradwire::app
